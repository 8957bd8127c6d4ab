"""FlashAttention itself, on a GPU, against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_cases import PagedCase, paged_case, relative_rms

from kernels.attention import PagedBatch, paged_attention_reference
from kernels.flash import FlashBatch, find_flash
from kernels.flash_dispatch import FlashKind

# Hundreds of tests, which need not be collected.
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu

_BLOCK_SIZE = 256
# Lengths of queries and of sequences: prompts, chunks, decoded tokens, multiples of a block.
_MIXED = ([5, 256, 100, 1, 1], [5, 256, 900, 300, 1])
_DECODE = ([1, 1, 1, 1], [1, 256, 257, 2000])


def on_gpu(case: PagedCase) -> PagedCase:
    batch = case.batch
    return PagedCase(
        case.query.cuda(),
        case.k_cache.cuda(),
        case.v_cache.cuda(),
        PagedBatch(
            # Entries after a sequence's last block are never read.
            batch.block_table.clamp(min=0, max=len(case.k_cache) - 1).cuda(),
            batch.query_start_loc.cuda(),
            batch.seq_lens.cuda(),
            _BLOCK_SIZE,
            int(batch.query_lens.max()),
            int(batch.seq_lens.max()),
        ),
    )


@pytest.mark.parametrize("kind", list(FlashKind))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lens", [_MIXED, _DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    "features", [{}, {"sliding_window": 64}, {"softcap": 5.0}], ids=["plain", "window", "softcap"]
)
def test_equals_the_reference(
    kind: FlashKind,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    lens: tuple[list[int], list[int]],
    features: dict[str, Any],
) -> None:
    found, missing = find_flash()
    if kind in missing:
        pytest.skip(missing[kind])
    if kind == FlashKind.TORCH and "softcap" in features:
        pytest.skip("torch's has no soft-cap")
    case = paged_case(*lens, _BLOCK_SIZE, heads, head_dim).to(dtype)
    scale = head_dim**-0.5
    expected = paged_attention_reference(
        case.query, case.k_cache, case.v_cache, case.batch, scale=scale, **features
    )
    gpu = on_gpu(case)
    batch = FlashBatch.of(gpu.batch)
    out = found[kind](gpu.query, gpu.k_cache, gpu.v_cache, batch, scale=scale, **features)
    assert out.dtype == dtype
    assert relative_rms(out.cpu(), expected) < 1e-2


@pytest.mark.parametrize("kind", list(FlashKind))
def test_padding_rows_change_no_other_row(kind: FlashKind) -> None:
    """As graphs have them: length 0, a table of zeros, a query that is anything."""
    found, missing = find_flash()
    if kind in missing:
        pytest.skip(missing[kind])
    case = on_gpu(paged_case(*_DECODE, _BLOCK_SIZE, (8, 2), 128).to(torch.bfloat16))
    batch = FlashBatch.of(case.batch)
    alone = found[kind](case.query, case.k_cache, case.v_cache, batch, scale=0.1)
    rows = len(case.query)
    padded = replace(
        case.batch,
        block_table=torch.cat([case.batch.block_table, torch.zeros_like(case.batch.block_table)]),
        query_start_loc=torch.arange(2 * rows + 1, device="cuda"),
        seq_lens=torch.cat([case.batch.seq_lens, torch.zeros_like(case.batch.seq_lens)]),
    )
    query = torch.cat([case.query, case.query])
    out = found[kind](query, case.k_cache, case.v_cache, FlashBatch.of(padded), scale=0.1)
    assert relative_rms(out[:rows].cpu(), alone.cpu()) < 1e-2
    assert not out[:rows].isnan().any()
