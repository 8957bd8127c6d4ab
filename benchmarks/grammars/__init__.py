"""Measures libraries of grammars, and the price of structured output."""
