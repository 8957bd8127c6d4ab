"""Benchmarks: real processes, which they may look inside; the product does not know of them."""
