"""The server's span of each call that concerns a generation, and what is known of it there.

Called by `rpc` and `http`, which open it, and by `generation`, which adds to it.
"""
