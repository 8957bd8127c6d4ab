"""Log-probabilities: they go where their tokens go."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import grpc
import numpy as np
import pytest
from gateway_fake_scheduler import Delta, Entry, choice_end, deltas
from gateway_stack import Stack, info_of
from gateway_tokenizers import EOS, byte_fallback

from gateway_svc.detokenizer import TokenTexts, Vocabulary
from gateway_svc.multiplexer import Multiplexer
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError
from quire.v1 import inference_pb2 as pb

# (token id, log-probability, rank, text), a token's own first.
Told = list[tuple[int, float, int, str]]


def entries_of(token_id: int, at: int, k: int) -> list[Entry]:
    """What the scheduler says of the token at an index; no two indices have the same."""
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
    told = (
        [entries_of(id_, at, k) for at, id_ in enumerate(token_ids, first)] if k is not None else []
    )
    return Delta(wanted, first, token_ids, choice, told)


def expected(stack: Stack, token_ids: Sequence[int], k: int = 2) -> list[Told]:
    decode = stack.gateway.served.named(None).vocabulary.decode
    return [
        [(*entry, decode([entry.token_id])) for entry in entries_of(id_, at, k)]
        for at, id_ in enumerate(token_ids)
    ]


def told_in(parts: Iterable[pb.Choice | pb.ChoiceDelta]) -> list[Told]:
    """All that came with the tokens, and with each part as many as it has tokens."""
    told: list[Told] = []
    for part in parts:
        assert len(part.logprobs) == len(part.token_ids)
        told += [
            [(e.token_id, e.logprob, e.rank, e.text) for e in (one.sampled, *one.top)]
            for one in part.logprobs
        ]
    return told


def request(k: int | None = 2, **params: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(
        text="The", request_id="mine", sampling_params=pb.SamplingParams(logprobs=k, **params)
    )


async def parts_of(call: grpc.aio.UnaryStreamCall) -> list[pb.ChoiceDelta]:
    return [part async for response in call for part in response.deltas]


@pytest.mark.parametrize(
    ("k", "num_logprobs"), [(None, 0), (0, 1), (1, 2), (20, 21)], ids=["absent", "0", "1", "20"]
)
async def test_what_is_asked_for_is_passed_on(
    stack: Stack, k: int | None, num_logprobs: int
) -> None:
    ids = stack.encode("fox")
    call = stack.inference.StreamGenerate(request(k))
    submission = await stack.scheduler.submissions.get()
    assert submission.params.num_logprobs == num_logprobs
    stack.scheduler.say(deltas=deltas(delta(submission, 0, ids, k=k)))
    stack.scheduler.end(submission, len(ids))
    parts = await parts_of(call)
    if k is None:
        assert not any(part.logprobs for part in parts)
    else:
        assert told_in(parts) == expected(stack, ids, k)


async def test_there_are_no_more_than_tokens_in_the_vocabulary(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = stack.gateway.served.named(None).files
    monkeypatch.setitem(files.__dict__, "vocab_size", 7)
    params = pb.SamplingParams(logprobs=20)
    ids = pb.TokenIds(ids=[1])
    call = stack.inference.Generate(pb.GenerateRequest(token_ids=ids, sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    assert submission.params.num_logprobs == 8
    stack.scheduler.say(deltas=deltas(delta(submission, 0, [6], k=7)))
    stack.scheduler.end(submission, 1)
    assert told_in((await call).choices) == expected(stack, [6], 7)


async def test_an_answer_that_would_not_fit_into_a_message_is_refused(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.validation.MAX_LOGPROBS", 100)

    def asked(max_tokens: int) -> pb.GenerateRequest:
        params = pb.SamplingParams(logprobs=4, n=2, max_tokens=max_tokens)
        return pb.GenerateRequest(text="x", sampling_params=params)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(asked(11))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info_of(caught.value).reason == "TOO_MANY_LOGPROBS"
    call = asyncio.ensure_future(stack.inference.Generate(asked(10)))
    submission = await stack.scheduler.submissions.get()
    ends = [choice_end(submission, 0, choice=choice) for choice in range(2)]
    stack.scheduler.say(choice_ends=ends)
    assert len((await call).choices) == 2


async def test_a_stream_has_them_with_each_token(stack: Stack) -> None:
    ids = stack.encode("Größe 🙂" + EOS)
    call = stack.inference.StreamGenerate(request())
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    for at, id_ in enumerate(ids):
        stack.scheduler.say(deltas=deltas(delta(submission, at, [id_])))
    stack.scheduler.end(
        submission, len(ids), scheduler_pb2.END_REASON_STOP_TOKEN, stop_token_id=ids[-1]
    )
    told = told_in(await parts_of(call))
    assert told == expected(stack, ids)
    texts = [own[3] for own, *_ in told]
    # The bytes of an unfinished character, and a special token.
    assert "\N{REPLACEMENT CHARACTER}" in texts
    assert texts[-1] == EOS


async def test_an_answer_has_them_all(stack: Stack) -> None:
    ids = stack.encode("brown fox")
    params = pb.SamplingParams(logprobs=2)
    call = stack.inference.Generate(pb.GenerateRequest(text="The", sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.say(deltas=deltas(delta(submission, 0, ids[:2])))
    stack.scheduler.say(deltas=deltas(delta(submission, 2, ids[2:])))
    stack.scheduler.end(submission, len(ids))
    assert told_in((await call).choices) == expected(stack, ids)


async def test_those_who_did_not_ask_share_frames_with_those_who_did(stack: Stack) -> None:
    ids = stack.encode("fox")
    calls = [stack.inference.StreamGenerate(request(k)) for k in (None, 1, None, 3)]
    wanted = [await stack.scheduler.submissions.get() for _ in calls]
    wanted.sort(key=lambda one: one.params.num_logprobs)
    parts = [delta(one, 0, ids, k=k) for one, k in zip(wanted, (None, None, 1, 3), strict=True)]
    nobody = scheduler_pb2.Submission(attachment=12345)
    # One between them that this gateway has left.
    entries = [parts[0], parts[3], delta(nobody, 0, ids, k=4), parts[1], parts[2]]
    stack.scheduler.say(deltas=deltas(*entries))
    for one in wanted:
        stack.scheduler.end(one, len(ids))
    told = [await parts_of(call) for call in calls]
    for parts_of_one, k in zip(told, (None, 1, None, 3), strict=True):
        if k is None:
            assert not any(part.logprobs for part in parts_of_one)
        else:
            assert told_in(parts_of_one) == expected(stack, ids, k)


async def test_each_choice_has_its_own(stack: Stack) -> None:
    """The second one begins later: the first frame has nothing of it."""
    ids = [stack.encode("brown fox"), stack.encode("jumps over")]
    call = stack.inference.StreamGenerate(request(n=2))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.say(deltas=deltas(delta(submission, 0, ids[0][:2])))
    stack.scheduler.say(
        deltas=deltas(delta(submission, 0, ids[1], choice=1), delta(submission, 2, ids[0][2:])),
        choice_ends=[choice_end(submission, len(ids[1]), choice=1)],
    )
    stack.scheduler.end(submission, len(ids[0]))
    parts = await parts_of(call)
    for choice in range(2):
        mine = [part for part in parts if part.index == choice]
        assert told_in(mine) == expected(stack, ids[choice])


async def test_a_stop_string_cuts_them_with_their_tokens(stack: Stack) -> None:
    ids = stack.encode("one STOP two three")
    for pieces in ([ids], [[id_] for id_ in ids]):
        call = stack.inference.StreamGenerate(request(stop=["STOP"]))
        submission = await stack.scheduler.submissions.get()
        stack.scheduler.accept(submission)
        first = 0
        for piece in pieces:
            stack.scheduler.say(deltas=deltas(delta(submission, first, piece)))
            first += len(piece)
        finish = await stack.scheduler.finishes.get()
        stack.scheduler.end(submission, finish.num_tokens, scheduler_pb2.END_REASON_STOP_STRING)
        told = told_in(await parts_of(call))
        assert told == expected(stack, ids[: finish.num_tokens])
        assert finish.num_tokens < len(ids)


async def test_a_stream_goes_on_with_those_behind_its_clients(stack: Stack) -> None:
    ids = stack.encode("Größe 🙂 STO and more")
    first_call = stack.inference.StreamGenerate(request(stop=["STOP"]))
    submission = await stack.scheduler.submissions.get()
    for next_index in range(len(ids) + 1):
        resumed = pb.ResumeGenerateRequest(request_id="mine", next_token_indices=[next_index])
        call = stack.inference.ResumeGenerate(resumed)
        attachment = await stack.scheduler.attachments.get()
        # The rest comes after the replay.
        parts = deltas(delta(attachment, 0, ids[:4]))
        stack.scheduler.accept(attachment, submission.opaque, deltas=parts)
        stack.scheduler.say(deltas=deltas(delta(attachment, 4, ids[4:])))
        stack.scheduler.end(attachment, len(ids))
        assert told_in(await parts_of(call)) == expected(stack, ids)[next_index:]
    first_call.cancel()


async def test_a_long_replay_is_cut_into_pieces_with_them(stack: Stack) -> None:
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
    assert told_in(parts) == expected(stack, ids)[300:]
    first_call.cancel()


async def test_what_comes_again_is_dropped_with_its_own(stack: Stack) -> None:
    ids = stack.encode("abcdef")
    call = stack.inference.StreamGenerate(request())
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.say(deltas=deltas(delta(submission, 0, ids[:3])))
    stack.scheduler.say(deltas=deltas(delta(submission, 1, ids[1:])))
    stack.scheduler.end(submission, len(ids))
    assert told_in(await parts_of(call)) == expected(stack, ids)


async def test_they_fill_no_queue_of_tokens() -> None:
    requests = Multiplexer(10, wait_s=30)
    requests.open()
    submission = scheduler_pb2.Submission()
    state = gateway_pb2.StreamState(num_choices=1)
    overflows: list[bool] = []
    stream = requests.submit(submission, state, lambda: overflows.append(True))
    for first, overflown in ((0, []), (10, [True])):
        new = delta(submission, first, [5] * 10, k=20)
        requests.deliver(scheduler_pb2.ConnectResponse(deltas=deltas(new)))
        assert overflows == overflown
    with pytest.raises(RequestError, match="more than 10 tokens waited"):
        await stream.take()
    requests.leave(stream)
    assert requests.is_idle


def a_count_is_missing(told: scheduler_pb2.TokenDeltas) -> None:
    del told.num_logprobs[-1]


def all_counts_are_missing(told: scheduler_pb2.TokenDeltas) -> None:
    del told.num_logprobs[:]


def a_rank_is_missing(told: scheduler_pb2.TokenDeltas) -> None:
    told.logprobs = told.logprobs[:-4]


def one_is_too_much(told: scheduler_pb2.TokenDeltas) -> None:
    told.logprobs += bytes(12)


def they_are_missing(told: scheduler_pb2.TokenDeltas) -> None:
    told.logprobs = b""


def a_count_is_another(told: scheduler_pb2.TokenDeltas) -> None:
    told.num_logprobs[0] += 1


def the_own_is_another(told: scheduler_pb2.TokenDeltas) -> None:
    told.logprobs = b"!" + told.logprobs[1:]


@pytest.mark.parametrize(
    "spoil",
    [
        a_count_is_missing,
        all_counts_are_missing,
        a_rank_is_missing,
        one_is_too_much,
        they_are_missing,
        a_count_is_another,
        the_own_is_another,
    ],
)
async def test_tokens_whose_own_do_not_fit_are_asked_for_again(
    stack: Stack, spoil: Callable[[scheduler_pb2.TokenDeltas], None]
) -> None:
    ids = stack.encode("abcd")
    call = stack.inference.StreamGenerate(request())
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    stack.scheduler.say(deltas=deltas(delta(submission, 0, ids[:1])))
    spoilt = deltas(delta(submission, 1, ids[1:]))
    spoil(spoilt)
    stack.scheduler.say(deltas=spoilt, choice_ends=[choice_end(submission, len(ids))])
    again = await asyncio.wait_for(stack.scheduler.submissions.get(), 10)
    assert (again.again, list(again.next_indices)) == (True, [1])
    stack.scheduler.accept(again, deltas=deltas(delta(again, 1, ids[1:])))
    stack.scheduler.end(again, len(ids))
    assert told_in(await parts_of(call)) == expected(stack, ids)
    assert stack.scheduler.num_connects == 1
    await stack.the_next_request_works()


async def test_a_scheduler_whose_own_never_fit_is_at_fault(stack: Stack) -> None:
    call = stack.inference.StreamGenerate(request(n=2))
    for _ in range(4):
        submission = await stack.scheduler.submissions.get()
        spoilt = deltas(*(delta(submission, 0, [5], choice) for choice in range(2)))
        spoilt.logprobs = b""
        stack.scheduler.accept(submission, deltas=spoilt)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await parts_of(call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    detachment = await stack.scheduler.detachments.get()
    assert detachment == scheduler_pb2.Detachment(attachment=submission.attachment)
    await stack.the_next_request_works()


def test_a_token_alone_is_as_the_tokenizer_writes_it() -> None:
    tokenizer = byte_fallback()
    texts = TokenTexts(Vocabulary.of(tokenizer))
    id_of = tokenizer.token_to_id
    assert texts[id_of(EOS)] == EOS
    assert texts[id_of("日")] == "日"
    assert texts[id_of("<0xF0>")] == "\N{REPLACEMENT CHARACTER}"
    # A row of the embedding that no token has.
    assert texts[10**6] == ""
    assert len(texts) == 4
