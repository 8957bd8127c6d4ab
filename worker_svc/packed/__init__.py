"""A cache on disk of models whose weights are packed, and models that are mapped from it.

Called by `loading`. Imports `model` and `cache`, and transformers nowhere but in `capture`.
"""
