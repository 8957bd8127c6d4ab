"""Limits on what a gateway accepts at once: live calls, bytes of requests, and the size of each.

Used by all public APIs. Works on counts and serialized bytes, before anything is parsed.
"""
