"""Loading of checkpoints and the forward pass: attention, fused layers, packed weights.

Called by `loading`, `runner`, `gpu`, `cache`, `packed`, `ranks`, `speculation` and `sim`. Imports
attention specs and scales from `cache`.
"""
