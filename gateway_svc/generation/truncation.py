"""Truncation of prompts to their last tokens. Pure."""

from quire.v1 import inference_pb2


def num_kept_tokens(
    num_tokens: int, params: inference_pb2.SamplingParams, max_model_len: int
) -> int:
    """How many of a prompt's tokens are kept."""
    if not params.HasField("truncate_prompt_tokens"):
        return num_tokens
    kept = params.truncate_prompt_tokens
    if kept >= max_model_len:
        num_output_tokens = params.max_tokens if params.HasField("max_tokens") else 1
        kept = max(1, max_model_len - num_output_tokens)
    return min(num_tokens, kept)
