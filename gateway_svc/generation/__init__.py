"""Generation: requests from validation to the last update, with their choices and resumption.

Called by `rpc`, through `service`, and by `metrics`. Sends requests through `scheduler` and decodes
tokens through `text`.
"""
