"""Formats that the output of a request follows, as grammars."""
