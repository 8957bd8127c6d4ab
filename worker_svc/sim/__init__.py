"""A worker without a model: the same rows, tables and plans, tokens from a formula, time from a
linear model, and a ledger that checks what the scheduler asks for.

Knows no torch. Shares servicer, lane, tables and inputs with the worker that runs a model.
"""
