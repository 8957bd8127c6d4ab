"""The paths of the HTTP API: each class adds its own to a router, and adapts their requests.

Called by `app`.
"""
