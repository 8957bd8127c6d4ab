"""FlashAttention: when it is chosen, and the arguments of its functions."""

import inspect
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_cases import PagedCase, paged_case, relative_rms
from torch.nn.attention.varlen import varlen_attn

from kernels import flash
from kernels.attention import paged_attention_reference
from kernels.dispatch import NoSuchKernel
from kernels.flash import FlashAttention, FlashBatch, PackageFlash, TorchFlash, find_flash
from kernels.flash_dispatch import AttentionNeeds, FlashChoice, FlashKind, choose_flash

_NEEDS = AttentionNeeds(
    device_type="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    block_size=256,
    head_dims=frozenset({(128, 128)}),
)
_PACKAGE, _TORCH = FlashKind.PACKAGE, FlashKind.TORCH


# The signatures that flash-attn 2.8 publishes, without what they do.
def published_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
    block_table: Any = None,
) -> None: ...


def published_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    rotary_interleaved: Any = True,
    alibi_slopes: Any = None,
    num_splits: Any = 0,
    return_softmax_lse: Any = False,
) -> None: ...


def varlen_of_torch_2_11(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: Any,
    max_k: Any,
    *,
    return_aux: Any = None,
    scale: Any = None,
    window_size: Any = (-1, -1),
) -> None: ...


def test_the_package_goes_first() -> None:
    first = {_TORCH: "flash-attn goes first"}
    assert choose_flash(_NEEDS, {}) == FlashChoice(_PACKAGE, first)
    missing = {_PACKAGE: "not installed"}
    assert choose_flash(_NEEDS, missing) == FlashChoice(_TORCH, missing)
    both = {**missing, _TORCH: "torch 2.11 takes no block_table"}
    assert choose_flash(_NEEDS, both) == FlashChoice(None, both)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device_type": "cpu", "capability": None}, "cpu"),
        ({"capability": (7, 5)}, "7.5"),
        ({"block_size": 16}, "16"),
        ({"block_size": 384}, "384"),
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, "float32"),
        ({"cache_dtype": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ({"cache_dtype": torch.float16}, "float16"),
        ({"head_dims": frozenset({(128, 128), (192, 128)})}, "192"),
        ({"head_dims": frozenset({(288, 288)})}, "288"),
        ({"head_dims": frozenset({(100, 100)})}, "100"),
        ({"has_sinks": True}, "sinks"),
    ],
)
def test_neither_serves(change: dict[str, Any], word: str) -> None:
    choice = choose_flash(replace(_NEEDS, **change), {})
    assert choice.kind is None
    assert set(choice.reasons) == set(FlashKind)
    assert all(word in reason for reason in choice.reasons.values())


def test_more_that_serves() -> None:
    for change in (
        {"dtype": torch.float16, "cache_dtype": torch.float16},
        {"block_size": 512},
        {"head_dims": frozenset({(64, 64), (256, 256)})},
    ):
        assert choose_flash(replace(_NEEDS, **change), {}).kind == _PACKAGE


def test_a_soft_cap_needs_the_package() -> None:
    needs = replace(_NEEDS, has_softcap=True)
    assert choose_flash(needs, {}).kind == _PACKAGE
    choice = choose_flash(needs, {_PACKAGE: "not installed"})
    assert choice.kind is None
    assert "soft-cap" in choice.reasons[_TORCH]


def test_a_setting_names_one_or_none() -> None:
    assert choose_flash(_NEEDS, {}, "paged").kind is None
    named = {_PACKAGE: "the setting is torch-varlen"}
    assert choose_flash(_NEEDS, {}, "torch-varlen") == FlashChoice(_TORCH, named)
    # Also before the setting of the other kernels.
    needs = replace(_NEEDS, kernels="triton")
    assert choose_flash(needs, {}, "torch-varlen") == FlashChoice(_TORCH, named)
    why = dict.fromkeys(FlashKind, "the kernels are set: triton")
    assert choose_flash(needs, {}) == FlashChoice(None, why)
    with pytest.raises(NoSuchKernel, match="flash-attn: not installed"):
        choose_flash(_NEEDS, {_PACKAGE: "not installed"}, "flash-attn")
    with pytest.raises(NoSuchKernel, match=r"torch-varlen: .*256.*16"):
        choose_flash(replace(_NEEDS, block_size=16), {}, "torch-varlen")


class Recorder:
    """A function that checks calls against a published signature and returns one result."""

    def __init__(self, published: Any, result: torch.Tensor) -> None:
        self._signature = inspect.signature(published)
        self._result = result
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.calls.append(bound.arguments)
        return self._result


def mixed_case(max_lens: tuple[int, int] | None = None) -> PagedCase:
    """A prompt, a chunk of one, and a decoded token."""
    return with_maxima(paged_case([5, 3, 1], [5, 9, 300], 256, (4, 2), 16), max_lens)


def decode_case(max_lens: tuple[int, int] | None = None) -> PagedCase:
    return with_maxima(paged_case([1, 1, 1], [5, 9, 300], 256, (4, 2), 16), max_lens)


def with_maxima(case: PagedCase, max_lens: tuple[int, int] | None) -> PagedCase:
    if max_lens is None:
        return case
    batch = replace(case.batch, max_query_len=max_lens[0], max_seq_len=max_lens[1])
    return replace(case, batch=batch)


def call(attend: FlashAttention, case: PagedCase, **features: Any) -> torch.Tensor:
    batch = FlashBatch.of(case.batch)
    return attend(case.query, case.k_cache, case.v_cache, batch, scale=0.25, **features)


def test_the_package_s_prompts_go_through_varlen() -> None:
    case = mixed_case((5, 300))
    varlen = Recorder(published_varlen, case.query)
    decode = Recorder(published_with_kvcache, case.query)
    out = call(PackageFlash(varlen, decode), case, sliding_window=64, softcap=30.0)
    assert out is case.query
    assert not decode.calls
    [given] = varlen.calls
    assert given["q"] is case.query
    assert given["k"] is case.k_cache
    assert given["v"] is case.v_cache
    assert given["block_table"] is case.batch.block_table
    for name, expected in (("cu_seqlens_q", [0, 5, 8, 9]), ("cu_seqlens_k", [0, 5, 14, 314])):
        assert given[name].dtype == torch.int32
        assert given[name].tolist() == expected
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (5, 300)
    assert (given["softmax_scale"], given["causal"], given["softcap"]) == (0.25, True, 30.0)
    # A query's own key counts in our windows, not in these.
    assert given["window_size"] == (63, 0)
    assert given["dropout_p"] == 0.0


def test_the_package_s_decoded_rows_go_through_with_kvcache() -> None:
    case = decode_case((1, 300))
    varlen = Recorder(published_varlen, case.query)
    decode = Recorder(published_with_kvcache, case.query.unsqueeze(1))
    out = call(PackageFlash(varlen, decode), case)
    assert out.shape == case.query.shape
    assert not varlen.calls
    [given] = decode.calls
    assert given["q"].shape == (3, 1, 4, 16)
    assert given["cache_seqlens"].dtype == torch.int32
    assert given["cache_seqlens"].tolist() == [5, 9, 300]
    assert given["block_table"] is case.batch.block_table
    assert (given["softmax_scale"], given["causal"], given["softcap"]) == (0.25, True, 0.0)
    assert given["window_size"] == (-1, -1)
    assert given["k"] is None


@pytest.mark.parametrize(
    ("case", "sliding_window", "window_size"),
    [
        (mixed_case(), None, (-1, 0)),
        (mixed_case(), 64, (63, 0)),
        (decode_case(), None, (-1, -1)),
        (decode_case(), 1, (0, 0)),
    ],
)
def test_torch_s_varlen(
    case: PagedCase, sliding_window: int | None, window_size: tuple[int, int]
) -> None:
    varlen = Recorder(varlen_attn, case.query)
    call(TorchFlash(varlen), case, sliding_window=sliding_window)
    [given] = varlen.calls
    assert given["window_size"] == window_size
    assert given["key"] is case.k_cache
    assert given["block_table"] is case.batch.block_table
    assert given["seqused_k"].dtype == torch.int32
    assert given["seqused_k"].tolist() == case.batch.seq_lens.tolist()
    assert given["cu_seq_q"].tolist() == case.batch.query_start_loc.tolist()
    assert (given["max_q"], given["max_k"]) == (case.batch.longest_query, 300)
    assert (given["scale"], given["enable_gqa"], given["return_aux"]) == (0.25, True, None)
    with pytest.raises(ValueError, match="soft-cap"):
        call(TorchFlash(varlen), case, softcap=5.0)


def test_a_row_without_a_query_is_no_decode() -> None:
    """Functions for decoded rows take one query from each."""
    case = paged_case([1, 0, 1], [5, 9, 300], 256, (4, 2), 16)
    varlen = Recorder(published_varlen, case.query)
    call(PackageFlash(varlen, Recorder(published_with_kvcache, case.query)), case)
    [given] = varlen.calls
    # With 1 the package takes the number of rows for that of tokens.
    assert given["max_seqlen_q"] == 2


def test_what_the_host_knows_is_not_asked_of_the_device() -> None:
    """A tensor on `meta` has nothing that could be read."""
    batch = decode_case((1, 4096)).batch
    away = replace(
        batch,
        block_table=batch.block_table.to("meta"),
        query_start_loc=batch.query_start_loc.to("meta"),
        seq_lens=batch.seq_lens.to("meta"),
    )
    assert (FlashBatch.of(away).max_query_len, FlashBatch.of(away).max_seq_len) == (1, 4096)


def obvious_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    window_size: tuple[int, int],
    lens: list[int],
    block_table: torch.Tensor,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """What FlashAttention documents: the mask ends at the lower right, the window counts keys to
    the left and right of the query's own, -1 is no limit."""
    out = torch.empty_like(q)
    for seq, length in enumerate(lens):
        start, end = cu_seqlens_q[seq : seq + 2].tolist()
        blocks = block_table[seq, : -(-length // k.shape[1])].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (k, v))
        distance = torch.arange(length) - torch.arange(length - (end - start), length)[:, None]
        left, right = window_size[0], 0 if causal else window_size[1]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden |= (distance < -left) & (left >= 0)
        hidden |= (distance > right) & (right >= 0)
        group = q.shape[1] // k.shape[2]
        for head in range(q.shape[1]):
            scores = q[start:end, head] @ keys[:, head // group].T * scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[start:end, head] = weights @ values[:, head // group]
    return out


@pytest.mark.parametrize("sliding_window", [None, 1, 4, 64])
@pytest.mark.parametrize("case", [mixed_case(), decode_case()])
def test_the_documented_meaning_is_ours(case: PagedCase, sliding_window: int | None) -> None:
    """According to FlashAttention's documentation, the arguments request the reference's result."""
    lens = case.batch.seq_lens.tolist()

    def varlen(q: Any, k: Any, v: Any, starts: Any, _: Any, *maxima: int, **given: Any) -> Any:
        scale = given.get("scale", given.get("softmax_scale"))
        causal = given.get("causal", given["window_size"] == (-1, 0))
        window, table = given["window_size"], given["block_table"]
        return obvious_varlen(q, k, v, starts, window, lens, table, scale, causal)

    def with_kvcache(q: Any, k: Any, v: Any, **given: Any) -> Any:
        starts = torch.arange(len(q) + 1)
        return varlen(q.squeeze(1), k, v, starts, None, **given).unsqueeze(1)

    features = {"sliding_window": sliding_window}
    caches = case.k_cache, case.v_cache
    expected = paged_attention_reference(case.query, *caches, case.batch, scale=0.25, **features)
    for attend in (PackageFlash(varlen, with_kvcache), TorchFlash(varlen)):
        assert relative_rms(call(attend, case, **features), expected) < 1e-5


def test_functions_that_lack_something_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"flash_attn": ModuleType("flash_attn"), "torch.nn.attention.varlen": ModuleType("")}
    old, new = modules.values()
    old.__dict__.update(__version__="2.1", flash_attn_varlen_func=varlen_of_torch_2_11)
    new.__dict__["varlen_attn"] = varlen_of_torch_2_11
    monkeypatch.setattr(flash, "import_module", modules.__getitem__)
    found, missing = find_flash()
    assert not found
    assert missing[_PACKAGE].endswith("flash_attn_varlen_func takes no softcap, block_table")
    assert missing[_TORCH].endswith("varlen_attn takes no enable_gqa, seqused_k, block_table")


def test_functions_that_take_everything_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("flash_attn")
    package.__dict__.update(
        flash_attn_varlen_func=published_varlen, flash_attn_with_kvcache=published_with_kvcache
    )
    torch_s = ModuleType("varlen")
    torch_s.__dict__["varlen_attn"] = varlen_attn
    modules = {"flash_attn": package, "torch.nn.attention.varlen": torch_s}
    monkeypatch.setattr(flash, "import_module", modules.__getitem__)
    found, missing = find_flash()
    assert not missing
    assert found == {
        _PACKAGE: PackageFlash(published_varlen, published_with_kvcache),
        _TORCH: TorchFlash(varlen_attn),
    }


def test_what_is_not_installed_or_cannot_be_loaded_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str) -> ModuleType:
        if name == "flash_attn":
            raise ModuleNotFoundError(name=name)
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(flash, "import_module", load)
    assert find_flash() == (
        {},
        {
            _PACKAGE: "not installed",
            _TORCH: "libcudart.so.13: cannot open shared object file",
        },
    )


def test_a_package_that_is_broken_is_not_said_not_to_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [
        ModuleNotFoundError("No module named 'flash_attn_2_cuda'", name="flash_attn_2_cuda"),
        RuntimeError("built for another torch"),
    ]
    for error in errors:

        def load(name: str, error: Exception = error) -> ModuleType:
            raise error

        monkeypatch.setattr(flash, "import_module", load)
        assert find_flash()[1][_PACKAGE] == str(error)
