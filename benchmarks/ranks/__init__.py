"""Measures workers of several ranks: the time of a decode step, and what of it is communication."""
