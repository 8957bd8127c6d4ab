"""Execution on CUDA devices: staged inputs, streams, CUDA graphs and pipelined steps.

Called by `loading` and `ranks` on GPUs, and by `cache` for sizes. Imports `model`, and the pool
from `cache`.
"""
