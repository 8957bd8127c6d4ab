"""Limits on what a gateway accepts at once: live calls, bytes of requests, the size of each, and
the headers and the age of HTTP connections; and which web pages may use it.

Used by all public APIs. Works on counts, headers and serialized bytes, before anything is parsed.
"""
