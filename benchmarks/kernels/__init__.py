"""Compares the CPU kernels with torch's operations and the machine's limits."""
