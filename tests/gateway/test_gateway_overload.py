"""Many calls at once: all are served, or refused with a time to retry."""

import asyncio
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from gateway_fake_scheduler import FakeScheduler
from gateway_stack import Stack, info_of
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.service.channels import channel_options
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc, model_pb2


async def test_thousands_of_simultaneous_calls_are_served(stack: Stack) -> None:
    calls = [stack.models.ListModels(model_pb2.ListModelsRequest()) for _ in range(2500)]
    codes = Counter([await call.code() for call in calls])
    assert codes == {grpc.StatusCode.OK: 2500}
