"""A published worked example of vLLM's input preparation: a recording and the published arrays.

Three prompts of 3, 2 and 8 tokens, blocks of 2 tokens, at most 10 tokens per step. The first step
completes two prompts and computes 5 tokens of the third; the second decodes two rows and completes
the third prompt.
"""

from quire.internal.v1.worker_pb2 import (
    Admissions,
    BatchPlan,
    BlockAppends,
    Hello,
    Recording,
    Schedule,
    StepResult,
)

HELLO = Hello(
    block_size=2,
    num_blocks=9,
    max_num_seqs=3,
    max_model_len=12,
    max_num_batched_tokens=10,
    model_fingerprint=b"sim vocab_size=400 max_model_len=12",
)
_PROMPTS = Admissions(
    rows=[0, 1, 2],
    token_ids=[100, 101, 102, 200, 201, 300, 301, 302, 303, 304, 305, 306, 307],
    num_tokens=[3, 2, 8],
    num_prompt_tokens=[3, 2, 8],
    num_computed_tokens=[0, 0, 0],
    block_ids=[1, 2, 3, 4, 5, 6],
    num_blocks=[2, 1, 3],
    temperatures=[0.0] * 3,
    top_ks=[0] * 3,
    top_ps=[1.0] * 3,
    min_ps=[0.0] * 3,
    seeds=[0] * 3,
    num_logprobs=[0] * 3,
    num_prompt_logprobs=[0] * 3,
)
ENTRIES = (
    Recording(hello=HELLO),
    Recording(
        plan=BatchPlan(
            epoch=1,
            step=1,
            admissions=_PROMPTS,
            schedule=Schedule(rows=[0, 1, 2], num_scheduled_tokens=[3, 2, 5]),
        )
    ),
    Recording(
        result=StepResult(epoch=1, step=1, sampled_rows=[0, 1], sampled_token_ids=[103, 202])
    ),
    Recording(
        plan=BatchPlan(
            epoch=1,
            step=2,
            appends=BlockAppends(rows=[1, 2], block_ids=[7, 8], num_blocks=[1, 1]),
            schedule=Schedule(rows=[0, 1, 2], num_scheduled_tokens=[1, 1, 3]),
        )
    ),
)
PUBLISHED: tuple[dict[str, list[int]], ...] = (
    {
        "request_indices": [0, 0, 0, 1, 1, 2, 2, 2, 2, 2],
        "positions": [0, 1, 2, 0, 1, 0, 1, 2, 3, 4],
        "token_indices": [0, 1, 2, 12, 13, 24, 25, 26, 27, 28],
        "input_ids": [100, 101, 102, 200, 201, 300, 301, 302, 303, 304],
        "block_table_indices": [0, 0, 1, 6, 6, 12, 12, 13, 13, 14],
        "block_numbers": [1, 1, 2, 3, 3, 4, 4, 5, 5, 6],
        "block_offsets": [0, 1, 0, 0, 1, 0, 1, 0, 1, 0],
        "slot_mapping": [2, 3, 4, 6, 7, 8, 9, 10, 11, 12],
        "query_start_loc": [0, 3, 5, 10],
        "seq_lens": [3, 2, 5],
    },
    {
        "request_indices": [0, 1, 2, 2, 2],
        "positions": [3, 2, 5, 6, 7],
        "token_indices": [3, 14, 29, 30, 31],
        "input_ids": [103, 202, 305, 306, 307],
        "block_table_indices": [1, 7, 14, 15, 15],
        "block_numbers": [2, 7, 6, 8, 8],
        "block_offsets": [1, 0, 1, 0, 1],
        "slot_mapping": [5, 14, 13, 16, 17],
        "query_start_loc": [0, 1, 2, 5],
        "seq_lens": [4, 3, 8],
    },
)
