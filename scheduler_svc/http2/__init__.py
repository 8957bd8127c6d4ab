"""A gRPC call over an HTTP/2 connection of its own, read and written by the event loop's thread.

For the calls of a step only: a message through grpc.aio costs several times as much, because it
passes gRPC's threads.
"""
