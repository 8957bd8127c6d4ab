"""Plan messages as arrays: rows, block tables and the inputs of a forward pass.

Pure: imports no torch and no gRPC. Used by every package of the worker but `model` and `packed`.
"""
