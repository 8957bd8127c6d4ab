"""Measures kernels, runner and the whole stack on a GPU."""
