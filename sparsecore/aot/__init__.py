"""Ahead of time: one training step as a StableHLO program, without a TPU.

`program` traces a model into a `Program`, `lowering` writes the SparseCore calls in it, `pipeline`
drives a program over batches, `emulate` runs it on CPU devices. `compile` has libtpu compile a
program for a slice (`topology`) that need not exist, `hlo` reads what came out. Only `adapter`
knows private names of torch_tpu, jax and jaxlib.
"""
