"""The gRPC API without the library: message types come from server reflection."""

import argparse
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SERVICE = "quire.v1.InferenceService"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051", help="default: %(default)s")
    args = parser.parse_args()

    with grpc.insecure_channel(args.target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        print("services:", ", ".join(sorted(database.get_services())))
        service = DescriptorPool(database).FindServiceByName(SERVICE)
        method = service.methods_by_name["StreamGenerate"]
        request: Any = GetMessageClass(method.input_type)()
        request.text = "Return the number of"
        request.sampling_params.max_tokens = 32
        call: Any = channel.unary_stream(
            f"/{SERVICE}/StreamGenerate",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        for message in call(request, timeout=60):
            print("".join(delta.text for delta in message.deltas), end="", flush=True)
        print(f"\n{message.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
