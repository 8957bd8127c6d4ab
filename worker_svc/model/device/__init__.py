"""What replaces parts of a model on a GPU: products that are joined, and layers that launch few
kernels."""
