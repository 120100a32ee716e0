"""TorchRec models with their embedding tables on the TPU SparseCore, or on a plain CPU."""
