"""The operators' interface: status, metrics, and resets of the prefix caches.

Created by `scheduler_svc.server`. Reads the engine and its lanes.
"""
