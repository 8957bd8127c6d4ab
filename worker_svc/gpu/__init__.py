"""Execution on CUDA devices: staged inputs, streams, CUDA graphs and pipelined steps.

Called by `runner` on a GPU, and by `cache` for sizes. Imports `model`, and the pool from `cache`.
"""
