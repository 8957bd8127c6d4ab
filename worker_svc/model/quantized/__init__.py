"""Weights of 8 and 4 bits: readers of quantised checkpoints, quantisation while loading, and the
layers that multiply with such weights."""
