"""Plan messages as arrays: rows, block tables and the inputs of a forward pass.

Pure: imports no torch and no gRPC. Called by `service`, `runner`, `gpu`, `cache` and `sim`.
"""
