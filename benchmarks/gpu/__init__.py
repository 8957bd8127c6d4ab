"""What a GPU does with Quire: its kernels, the runner, and the whole stack."""
