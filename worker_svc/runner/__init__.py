"""Execution of a step: the device's thread, forward pass, sampling, loading and warm-up.

Called by `service` through `StepRunner`, by `worker_svc.__main__` to load, by followers in `ranks`
to load theirs, and by `gpu` and `sim`, which implement `StepRunner`.
"""
