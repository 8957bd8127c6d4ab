"""Generation: requests from validation to the last update, with their choices and resumption.

Called by `rpc` and `http`, through `service`. Sends requests through `scheduler` and decodes tokens
through `text`.
"""
