"""Ahead of time: one training step as a StableHLO program, without a TPU.

`program` traces a model into a `Program`, `lowering` writes the SparseCore calls in it, `pipeline`
drives a program over batches. Only `adapter` knows private names of torch_tpu, jax and jaxlib.
"""
