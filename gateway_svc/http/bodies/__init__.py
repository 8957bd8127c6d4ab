"""The bodies of HTTP requests: their fields, and the messages that they become.

Called by the routes.
"""
