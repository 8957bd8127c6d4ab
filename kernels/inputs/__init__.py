"""Values that kernels take as input: batches of paged sequences, options, sampling parameters.

Used by the operations, by their implementations and by the worker. They hold tensors only.
"""
