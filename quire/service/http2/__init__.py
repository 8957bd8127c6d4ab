"""gRPC over HTTP/2, read and written by the event loop's own thread.

`server` serves all services of a process, and `call` is a streaming call over a connection of its
own. A message through grpc.aio costs several times as much, because it passes
gRPC's threads.
"""
