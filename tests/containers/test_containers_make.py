"""`make up` and `make down`."""

import sys
from typing import Any

import grpc
import httpx2
import pytest
from compose_project import ROOT, ComposeProject, run
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from quire.client.client import Client
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]

# The first request of `make demo`.
PROMPT = "Return a list of"
PARAMS = SamplingParams(temperature=0.8, max_tokens=96, seed=1)


def test_up_serves_what_a_local_stack_serves_and_down_leaves_nothing(
    project: ComposeProject,
) -> None:
    project.make("up")
    assert project.is_ready()
    assert generated_by_command(project.target) == generated_locally()
    assert generated_through_reflection(project.target) == generated_locally()
    published = [sorted(c.published) for c in project.containers() if c.published]
    assert published == [["50051/tcp", "8000/tcp"]] * 2
    assert generated_over_http(project.http) == generated_locally()

    # Containers, networks, volumes: of Redis, the hub and the packed weights. Compose 1.29 creates
    # the volumes of a profile that is not used, too.
    unused = {f"{project.name}_{volume}" for volume in ("prometheus", "grafana")}
    assert len(set(project.leftovers()) - unused) == 6 + 2 + 3
    project.make("down")
    assert project.leftovers() == []


def generated_by_command(target: str) -> str:
    options = {
        "target": target,
        "temperature": PARAMS.temperature,
        "max-tokens": PARAMS.max_tokens,
        "seed": PARAMS.seed,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    printed = run(sys.executable, "-m", "quire", "generate", PROMPT, *flags)
    return printed.removesuffix("\n")


def generated_over_http(address: str) -> str:
    body = {"prompt": PROMPT, "temperature": 0.8, "max_tokens": 96, "seed": 1}
    response = httpx2.post(f"http://{address}/v1/completions", json=body, timeout=60)
    text: str = response.json()["choices"][0]["text"]
    return text


def generated_through_reflection(target: str) -> str:
    """Generate through server reflection, without stubs."""
    with grpc.insecure_channel(target) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service = pool.FindServiceByName("quire.v1.InferenceService")
        method = service.methods_by_name["Generate"]
        request = message_factory.GetMessageClass(method.input_type)()
        params = {"temperature": 0.8, "maxTokens": 96, "seed": 1}
        json_format.ParseDict({"text": PROMPT, "samplingParams": params}, request)
        call: Any = channel.unary_unary(
            "/quire.v1.InferenceService/Generate",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        response = json_format.MessageToDict(call(request, timeout=60))
    return str(response["choices"][0]["text"])


def generated_locally() -> str:
    with LocalStack(str(ROOT / "demo/model")) as stack, Client(stack.address) as client:
        return client.generate(PROMPT, PARAMS).outputs[0].text
