"""The HTTP APIs of OpenAI and Anthropic, adapters to `generation` as `rpc` is: one path for all.

Called by `server`. Requests become the messages of the gRPC API; choice updates become JSON.
"""
