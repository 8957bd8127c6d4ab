"""Beam search: the search itself, and the state of a group of beams. Both are pure; rows and blocks
of beams are in `lane.steps.beams`.

A search is one request, whose record and journal have the log of its steps in the place of tokens
(`quire/service/beams.py`). Its beams are sequences of one lane, each with a row of its own.
"""
