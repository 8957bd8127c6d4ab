"""`ModelService`: what this gateway serves."""

from gateway_svc.rpc import Calls, Context
from gateway_svc.scheduler_link import SchedulerLink
from gateway_svc.served_model import Model, ServedModel
from quire.v1 import model_pb2, model_pb2_grpc


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, served: ServedModel, link: SchedulerLink, calls: Calls) -> None:
        self._served = served
        self._link = link
        self._calls = calls

    async def ListModels(  # noqa: N802
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        async with self._calls.answering(context):
            model = self._served.named(None)
            return model_pb2.ListModelsResponse(models=[self._described(model)])
        raise AssertionError("answering ends the call")

    async def GetModel(  # noqa: N802
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        async with self._calls.answering(context):
            model = self._served.named(request.name, field="name")
            return model_pb2.GetModelResponse(model=self._described(model))
        raise AssertionError("answering ends the call")

    def _described(self, model: Model) -> model_pb2.Model:
        limits = model.limits(self._link.max_model_len)
        return model_pb2.Model(
            name=model.name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            has_chat_template=limits.has_chat_template,
        )
