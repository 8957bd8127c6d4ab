"""Execution of a step: the device's thread, forward pass, sampling, rounds.

Called by `service` through `StepRunner`, which `gpu` and `sim` implement, too. `loading` makes the
runner.
"""
