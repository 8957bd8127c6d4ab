"""The KV cache: its size by profiling, its tensors and the scales of 8-bit formats.

Set up by `loading.runner_loading`, after the model is loaded, and by `ranks` on followers.
`runner`, `gpu` and `speculation` use the pool, `model` the specs and scales, `sim` the size.
Imports `model` and `gpu` to profile a step.
"""
