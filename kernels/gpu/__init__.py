"""Kernels in Triton, for GPUs. A twin of each stands beside the operation, in `kernels/`."""
