"""Triton kernels and their launches, called by the operations in `kernels/`, which hold the
references."""
