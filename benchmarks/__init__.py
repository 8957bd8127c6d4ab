"""Benchmarks of the product. They may import any package; no product code imports them."""
