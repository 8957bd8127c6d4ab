"""Requests and the decisions about them: values in, values out, no Redis and no gRPC."""
