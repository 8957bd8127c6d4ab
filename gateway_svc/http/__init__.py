"""OpenAI's HTTP API, an adapter to `generation` as `rpc` is: one path, two APIs.

Called by `server`. Requests become the messages of the gRPC API; choice updates become JSON.
"""
