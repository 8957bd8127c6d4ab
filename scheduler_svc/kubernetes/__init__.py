"""Finds workers by Kubernetes' API.

`names` has what settings need. Only `endpoint_slices` imports an HTTP client, and it is imported by
name if a worker's name is that of a Service.
"""
