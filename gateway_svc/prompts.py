"""Prompts in any of their three forms, to token ids."""

from dataclasses import dataclass

from gateway_svc import validation
from gateway_svc.chat_template import TemplateError
from gateway_svc.served_model import Model
from gateway_svc.validation import GenerationRequest, ModelLimits
from quire.v1 import inference_pb2


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    # The output goes on in the prompt's own text. An answer in a conversation begins a new one.
    is_continued: bool


async def tokenize(request: GenerationRequest, model: Model, limits: ModelLimits) -> Prompt:
    """Of a checked request. RequestError if the prompt does not fit."""
    match request.WhichOneof("prompt"):
        case "token_ids":
            return Prompt(list(request.token_ids.ids), is_continued=True)
        case "text":
            prompt = Prompt(await model.encode(request.text, True), is_continued=True)
        case _:
            rendered = await render("prompt.conversation", request.conversation, model)
            validation.check_text("prompt", rendered, limits)
            prompt = Prompt(await model.encode(rendered, False), is_continued=False)
    validation.check_prompt_length(len(prompt.token_ids), limits.max_model_len)
    validation.check_token_ids("prompt", prompt.token_ids, limits.vocab_size)
    return prompt


async def render(field: str, conversation: inference_pb2.Conversation, model: Model) -> str:
    """RequestError at `field` if the model's template refuses the conversation."""
    messages = (
        {"role": message.role, "content": message.content} for message in conversation.messages
    )
    add = conversation.add_generation_prompt or not conversation.HasField("add_generation_prompt")
    try:
        return await model.render(messages, add)
    except TemplateError as error:
        raise validation.template_refusal(field, str(error)) from error
