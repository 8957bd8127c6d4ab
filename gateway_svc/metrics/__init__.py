"""Prometheus metrics of requests.

Called by `rpc`, which records them, and by `server`, which exposes them.
"""
