"""The connection to the leading scheduler: leader discovery and one stream for all requests.

Called by `generation`, `rpc` and `server`. Imports no other package of the gateway.
"""
