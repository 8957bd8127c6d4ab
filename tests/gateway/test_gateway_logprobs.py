"""Log-probabilities: delivered, dropped and requested again together with their tokens."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import grpc
import numpy as np
import pytest
from gateway_fake_scheduler import Delta, Entry, choice_end, deltas
from gateway_stack import Stack, info_of, shard_requests
from gateway_tokenizers import EOS, byte_fallback, byte_level, metaspace, word_piece
from tokenizers import Tokenizer

from gateway_svc.text.detokenizer import TokenTexts, Vocabulary
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError
from quire.v1 import inference_pb2 as pb

# (token id, log-probability, rank, text), the sampled token's first.
TokenEntries = list[tuple[int, float, int, str]]


def entries_of(token_id: int, at: int, k: int) -> list[Entry]:
    """The entries of the token at an index; distinct for every index."""
    own = Entry(token_id, float(np.float32(-0.1 - at)), at + 2)
    return [own, *(Entry(place, float(np.float32(-place / 3)), place) for place in range(1, k + 1))]


def delta(
    wanted: scheduler_pb2.Submission | scheduler_pb2.Attachment,
    first: int,
    token_ids: Sequence[int],
    choice: int = 0,
    k: int | None = 2,
) -> Delta:
    """New tokens with log-probabilities; without any where k is None."""
    logprobs = (
        [entries_of(id_, at, k) for at, id_ in enumerate(token_ids, first)] if k is not None else []
    )
    return Delta(wanted, first, token_ids, choice, logprobs)


def expected(stack: Stack, token_ids: Sequence[int], k: int = 2) -> list[TokenEntries]:
    decode = stack.gateway.served.get(None).vocabulary.decode
    return [
        [(*entry, decode([entry.token_id])) for entry in entries_of(id_, at, k)]
        for at, id_ in enumerate(token_ids)
    ]


def logprobs_in(parts: Iterable[pb.Choice | pb.ChoiceDelta]) -> list[TokenEntries]:
    """The entries of all tokens; asserts that each part has as many as tokens."""
    found: list[TokenEntries] = []
    for part in parts:
        assert len(part.logprobs) == len(part.token_ids)
        found += [
            [(e.token_id, e.logprob, e.rank, e.text) for e in (one.sampled, *one.top)]
            for one in part.logprobs
        ]
    return found


def request(k: int | None = 2, **params: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(
        text="The", request_id="mine", sampling_params=pb.SamplingParams(logprobs=k, **params)
    )


async def parts_of(call: grpc.aio.UnaryStreamCall) -> list[pb.ChoiceDelta]:
    return [part async for response in call for part in response.deltas]


@pytest.mark.parametrize(
    ("k", "num_logprobs"), [(None, 0), (0, 1), (1, 2), (20, 21)], ids=["absent", "0", "1", "20"]
)
async def test_the_requested_number_is_delivered(
    stack: Stack, k: int | None, num_logprobs: int
) -> None:
    ids = stack.encode("fox")
    call = stack.inference.StreamGenerate(request(k))
    submission = await stack.scheduler.submissions.get()
    assert submission.params.num_logprobs == num_logprobs
    stack.scheduler.send(deltas=deltas(delta(submission, 0, ids, k=k)))
    stack.scheduler.end(submission, len(ids))
    parts = await parts_of(call)
    if k is None:
        assert not any(part.logprobs for part in parts)
    else:
        assert logprobs_in(parts) == expected(stack, ids, k)


async def test_the_number_is_capped_by_the_vocabulary(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = stack.gateway.served.get(None).files
    monkeypatch.setitem(files.__dict__, "vocab_size", 7)
    params = pb.SamplingParams(logprobs=20)
    ids = pb.TokenIds(ids=[1])
    call = stack.inference.Generate(pb.GenerateRequest(token_ids=ids, sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    assert submission.params.num_logprobs == 8
    stack.scheduler.send(deltas=deltas(delta(submission, 0, [6], k=7)))
    stack.scheduler.end(submission, 1)
    assert logprobs_in((await call).choices) == expected(stack, [6], 7)


async def test_a_response_beyond_the_message_limit_is_refused(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.generation.validation.MAX_LOGPROBS", 100)

    def request_of(max_tokens: int) -> pb.GenerateRequest:
        params = pb.SamplingParams(logprobs=4, n=2, max_tokens=max_tokens)
        return pb.GenerateRequest(text="x", sampling_params=params)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(request_of(11))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info_of(caught.value).reason == "TOO_MANY_LOGPROBS"
    call = asyncio.ensure_future(stack.inference.Generate(request_of(10)))
    submission = await stack.scheduler.submissions.get()
    ends = [choice_end(submission, 0, choice=choice) for choice in range(2)]
    stack.scheduler.send(choice_ends=ends)
    assert len((await call).choices) == 2


@pytest.mark.parametrize(("logprobs", "max_tokens"), [(4, 10), (0, 50)])
async def test_the_default_of_max_tokens_is_as_many_as_a_response_holds(
    stack: Stack, logprobs: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.generation.validation.MAX_LOGPROBS", 100)
    params = pb.SamplingParams(logprobs=logprobs, n=2)
    request = pb.GenerateRequest(text="x", sampling_params=params)
    call = asyncio.ensure_future(stack.inference.Generate(request))
    submission = await stack.scheduler.submissions.get()
    assert submission.params.max_tokens == max_tokens
    stack.scheduler.send(choice_ends=[choice_end(submission, 0, choice=at) for at in range(2)])
    assert len((await call).choices) == 2


async def test_a_response_without_room_for_one_token_is_refused(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.generation.validation.MAX_LOGPROBS", 9)
    params = pb.SamplingParams(logprobs=4, n=2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(pb.GenerateRequest(text="x", sampling_params=params))
    assert info_of(caught.value).reason == "TOO_MANY_LOGPROBS"


async def test_a_stream_has_logprobs_for_each_token(stack: Stack) -> None:
    ids = stack.encode("Größe 🙂" + EOS)
    call = stack.inference.StreamGenerate(request())
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    for at, id_ in enumerate(ids):
        stack.scheduler.send(deltas=deltas(delta(submission, at, [id_])))
    stack.scheduler.end(
        submission, len(ids), scheduler_pb2.END_REASON_STOP_TOKEN, stop_token_id=ids[-1]
    )
    found = logprobs_in(await parts_of(call))
    assert found == expected(stack, ids)
    texts = [sampled[3] for sampled, *_ in found]
    # The bytes of an unfinished character, and a special token.
    assert "\N{REPLACEMENT CHARACTER}" in texts
    assert texts[-1] == EOS


async def test_a_unary_response_has_all_logprobs(stack: Stack) -> None:
    ids = stack.encode("brown fox")
    params = pb.SamplingParams(logprobs=2)
    call = stack.inference.Generate(pb.GenerateRequest(text="The", sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.send(deltas=deltas(delta(submission, 0, ids[:2])))
    stack.scheduler.send(deltas=deltas(delta(submission, 2, ids[2:])))
    stack.scheduler.end(submission, len(ids))
    assert logprobs_in((await call).choices) == expected(stack, ids)


async def test_requests_with_and_without_logprobs_share_frames(stack: Stack) -> None:
    ids = stack.encode("fox")
    calls = [stack.inference.StreamGenerate(request(k)) for k in (None, 1, None, 3)]
    wanted = [await stack.scheduler.submissions.get() for _ in calls]
    wanted.sort(key=lambda one: one.params.num_logprobs)
    parts = [delta(one, 0, ids, k=k) for one, k in zip(wanted, (None, None, 1, 3), strict=True)]
    unknown = scheduler_pb2.Submission(attachment=12345)
    # Between them, one of an attachment that this gateway does not have.
    entries = [parts[0], parts[3], delta(unknown, 0, ids, k=4), parts[1], parts[2]]
    stack.scheduler.send(deltas=deltas(*entries))
    for one in wanted:
        stack.scheduler.end(one, len(ids))
    received = [await parts_of(call) for call in calls]
    for parts_of_one, k in zip(received, (None, 1, None, 3), strict=True):
        if k is None:
            assert not any(part.logprobs for part in parts_of_one)
        else:
            assert logprobs_in(parts_of_one) == expected(stack, ids, k)


async def test_each_choice_has_its_own_logprobs(stack: Stack) -> None:
    """The second choice begins later: the first frame has none of its tokens."""
    ids = [stack.encode("brown fox"), stack.encode("jumps over")]
    call = stack.inference.StreamGenerate(request(n=2))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.send(deltas=deltas(delta(submission, 0, ids[0][:2])))
    stack.scheduler.send(
        deltas=deltas(delta(submission, 0, ids[1], choice=1), delta(submission, 2, ids[0][2:])),
        choice_ends=[choice_end(submission, len(ids[1]), choice=1)],
    )
    stack.scheduler.end(submission, len(ids[0]))
    parts = await parts_of(call)
    for choice in range(2):
        mine = [part for part in parts if part.index == choice]
        assert logprobs_in(mine) == expected(stack, ids[choice])


async def test_a_stop_string_drops_logprobs_with_their_tokens(stack: Stack) -> None:
    ids = stack.encode("one STOP two three")
    for pieces in ([ids], [[id_] for id_ in ids]):
        call = stack.inference.StreamGenerate(request(stop=["STOP"]))
        submission = await stack.scheduler.submissions.get()
        stack.scheduler.accept(submission)
        first = 0
        for piece in pieces:
            stack.scheduler.send(deltas=deltas(delta(submission, first, piece)))
            first += len(piece)
        finish = await stack.scheduler.finishes.get()
        stack.scheduler.end(submission, finish.num_tokens, scheduler_pb2.END_REASON_STOP_STRING)
        found = logprobs_in(await parts_of(call))
        assert found == expected(stack, ids[: finish.num_tokens])
        assert finish.num_tokens < len(ids)


async def test_a_resumed_stream_has_logprobs_from_its_next_token(stack: Stack) -> None:
    ids = stack.encode("Größe 🙂 STO and more")
    first_call = stack.inference.StreamGenerate(request(stop=["STOP"]))
    submission = await stack.scheduler.submissions.get()
    for next_index in range(len(ids) + 1):
        resumed = pb.ResumeGenerateRequest(request_id="mine", next_token_indices=[next_index])
        call = stack.inference.ResumeGenerate(resumed)
        attachment = await stack.scheduler.attachments.get()
        # The rest follows the replay.
        parts = deltas(delta(attachment, 0, ids[:4]))
        stack.scheduler.accept(attachment, submission.opaque, deltas=parts)
        stack.scheduler.send(deltas=deltas(delta(attachment, 4, ids[4:])))
        stack.scheduler.end(attachment, len(ids))
        assert logprobs_in(await parts_of(call)) == expected(stack, ids)[next_index:]
    first_call.cancel()


async def test_a_long_replay_is_split_with_its_logprobs(stack: Stack) -> None:
    [x] = stack.encode("x")
    ids = [x] * 1000
    first_call = stack.inference.StreamGenerate(request())
    submission = await stack.scheduler.submissions.get()
    resumed = pb.ResumeGenerateRequest(request_id="mine", next_token_indices=[300])
    call = stack.inference.ResumeGenerate(resumed)
    attachment = await stack.scheduler.attachments.get()
    stack.scheduler.accept(attachment, submission.opaque, deltas=deltas(delta(attachment, 0, ids)))
    stack.scheduler.end(attachment, len(ids))
    parts = await parts_of(call)
    assert len(parts) > 2
    assert logprobs_in(parts) == expected(stack, ids)[300:]
    first_call.cancel()


async def test_repeated_tokens_are_dropped_with_their_logprobs(stack: Stack) -> None:
    ids = stack.encode("abcdef")
    call = stack.inference.StreamGenerate(request())
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.send(deltas=deltas(delta(submission, 0, ids[:3])))
    stack.scheduler.send(deltas=deltas(delta(submission, 1, ids[1:])))
    stack.scheduler.end(submission, len(ids))
    assert logprobs_in(await parts_of(call)) == expected(stack, ids)


async def test_logprobs_do_not_count_towards_the_bound() -> None:
    requests = shard_requests()
    requests.on_connected()
    submission = scheduler_pb2.Submission()
    state = gateway_pb2.ResumeState(num_choices=1)
    overflows: list[bool] = []
    stream = requests.submit(submission, state, lambda: overflows.append(True))
    for first, overflown in ((0, []), (10, [True])):
        new = delta(submission, first, [5] * 10, k=20)
        requests.deliver(scheduler_pb2.ConnectResponse(deltas=deltas(new)))
        assert overflows == overflown
    with pytest.raises(RequestError, match="more than 10 tokens were queued"):
        await stream.get()
    requests.close(stream)
    assert requests.is_idle


def a_count_is_missing(deltas: scheduler_pb2.TokenDeltas) -> None:
    del deltas.num_logprobs[-1]


def all_counts_are_missing(deltas: scheduler_pb2.TokenDeltas) -> None:
    del deltas.num_logprobs[:]


def a_rank_is_missing(deltas: scheduler_pb2.TokenDeltas) -> None:
    deltas.logprobs = deltas.logprobs[:-4]


def an_entry_is_added(deltas: scheduler_pb2.TokenDeltas) -> None:
    deltas.logprobs += bytes(12)


def all_entries_are_missing(deltas: scheduler_pb2.TokenDeltas) -> None:
    deltas.logprobs = b""


def a_count_is_wrong(deltas: scheduler_pb2.TokenDeltas) -> None:
    deltas.num_logprobs[0] += 1


def a_token_id_is_wrong(deltas: scheduler_pb2.TokenDeltas) -> None:
    deltas.logprobs = b"!" + deltas.logprobs[1:]


@pytest.mark.parametrize(
    "corrupt",
    [
        a_count_is_missing,
        all_counts_are_missing,
        a_rank_is_missing,
        an_entry_is_added,
        all_entries_are_missing,
        a_count_is_wrong,
        a_token_id_is_wrong,
    ],
)
async def test_tokens_with_mismatched_logprobs_are_requested_again(
    stack: Stack, corrupt: Callable[[scheduler_pb2.TokenDeltas], None]
) -> None:
    ids = stack.encode("abcd")
    call = stack.inference.StreamGenerate(request())
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    stack.scheduler.send(deltas=deltas(delta(submission, 0, ids[:1])))
    corrupted = deltas(delta(submission, 1, ids[1:]))
    corrupt(corrupted)
    stack.scheduler.send(deltas=corrupted, choice_ends=[choice_end(submission, len(ids))])
    again = await asyncio.wait_for(stack.scheduler.submissions.get(), 10)
    assert (again.again, list(again.next_indices)) == (True, [1])
    stack.scheduler.accept(again, deltas=deltas(delta(again, 1, ids[1:])))
    stack.scheduler.end(again, len(ids))
    assert logprobs_in(await parts_of(call)) == expected(stack, ids)
    assert stack.scheduler.num_connects == 1
    await stack.check_next_request()


async def test_repeatedly_mismatched_logprobs_fail_the_request(stack: Stack) -> None:
    call = stack.inference.StreamGenerate(request(n=2))
    for _ in range(4):
        submission = await stack.scheduler.submissions.get()
        corrupted = deltas(*(delta(submission, 0, [5], choice) for choice in range(2)))
        corrupted.logprobs = b""
        stack.scheduler.accept(submission, deltas=corrupted)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await parts_of(call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    detachment = await stack.scheduler.detachments.get()
    assert detachment == scheduler_pb2.Detachment(attachment=submission.attachment)
    await stack.check_next_request()


def test_the_text_of_a_single_token() -> None:
    tokenizer = byte_fallback()
    texts = TokenTexts(Vocabulary.from_tokenizer(tokenizer))
    id_of = tokenizer.token_to_id
    assert texts[id_of(EOS)] == EOS
    assert texts[id_of("日")] == "日"
    assert texts[id_of("<0xF0>")] == "\N{REPLACEMENT CHARACTER}"
    # A row of the embedding without a token.
    assert texts[10**6] == ""
    assert len(texts) == 4


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace, word_piece])
def test_the_joined_texts_of_tokens_are_the_text(make: Callable[[], Tokenizer]) -> None:
    """Behind another token: the first of all may lack its space."""
    tokenizer = make()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    texts = TokenTexts(vocabulary)
    for text in ("ab cd ab!", "the quick fox jumps"):
        first, *rest = tokenizer.encode(text, add_special_tokens=False).ids
        whole = vocabulary.decode([first, *rest])
        assert texts[first].lstrip() + "".join(texts[id_] for id_ in rest) == whole
