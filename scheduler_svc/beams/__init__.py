"""Beam search: the search itself, the state of a group of beams, and its rows and blocks in a step.

A search is one request, whose record and journal have the log of its steps in the place of tokens
(`quire/service/beams.py`). Its beams are sequences of one lane, each with a row of its own.
"""
