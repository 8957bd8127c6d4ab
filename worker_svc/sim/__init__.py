"""A worker without a model: the same rows, tables and plans, tokens from a formula, time from a
linear model, and a checker of the scheduler's plans.

Imports no torch. Shares servicer, stream, tables and inputs with the worker that runs a model.
"""
