"""Ranks on GPUs: which GPU each has, what they exchange within a pass, and how followers queue the
steps of rank 0. Called by `ranks` and `loading`."""
