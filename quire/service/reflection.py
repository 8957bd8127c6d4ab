"""Server reflection, under both of the names that clients ask for."""

from collections.abc import Iterable

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

# Equal to v1alpha on the wire. Clients ask for it first, and some for nothing else.
_STABLE_NAME = "grpc.reflection.v1.ServerReflection"


def add_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Lists `services` and itself; that as v1alpha only, the name it has a descriptor of."""
    servicer = reflection.aio.ReflectionServicer((*services, reflection.SERVICE_NAME))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (reflection.SERVICE_NAME, _STABLE_NAME):
        handler = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))
