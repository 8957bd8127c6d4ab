"""The kernels beside torch's own operations and the machine's limits."""
