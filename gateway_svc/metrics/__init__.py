"""Prometheus metrics of requests.

Called by `rpc` and `http`, which record them, and by `server`, which exposes them.
"""
