"""The `quire demo` command: streams from a private stack while its processes are killed.

Called by `quire.cli.demo`. The demo model itself is in `demo/` at the top.
"""
