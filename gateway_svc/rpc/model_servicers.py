"""`ModelService` and `TokenizerService`: the served model and its tokenizer."""

from gateway_svc.generation.tokenization import TokenizationService
from gateway_svc.rpc.call_interceptor import Context
from quire.v1 import model_pb2, model_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, tokenization: TokenizationService) -> None:
        self._tokenization = tokenization

    async def ListModels(  # noqa: N802
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[self._tokenization.model(None)])

    async def GetModel(  # noqa: N802
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        model = self._tokenization.model(request.name, field="name")
        return model_pb2.GetModelResponse(model=model)


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    def __init__(self, tokenization: TokenizationService) -> None:
        self._tokenization = tokenization

    async def Tokenize(  # noqa: N802
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        return await self._tokenization.tokenize(request)

    async def Detokenize(  # noqa: N802
        self, request: tokenizer_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        return await self._tokenization.detokenize(request)
