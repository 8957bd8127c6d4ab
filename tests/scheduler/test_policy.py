"""The policy on literals: what one step runs, in which order, with which blocks."""

from scheduler_svc.core.policy import Admitted, Limits, Running, Scheduled, Waiting, schedule

LIMITS = Limits(block_size=16, max_num_batched_tokens=64, max_num_seqs=4, watermark=0)
HASHES = [bytes([index]) * 32 for index in range(32)]


def waiting(num_tokens: int, num_hits: int = 0, num_free_hits: int = 0, out: int = 8) -> Waiting:
    full = HASHES[: num_tokens // 16]
    return Waiting(num_tokens, num_tokens + out, full, num_hits, num_free_hits)


def distinct(num_tokens: int, tag: int, out: int = 8) -> Waiting:
    full = [bytes([tag, index]) * 16 for index in range(num_tokens // 16)]
    return Waiting(num_tokens, num_tokens + out, full, 0, 0)


def decoding(num_tokens: int, held: int, out: int = 8) -> Running:
    return Running(num_tokens, num_tokens - 1, held, num_tokens + out)


def test_a_prompt_is_admitted_with_all_its_blocks():
    decision = schedule(LIMITS, [], [waiting(40)], 10)
    assert decision.admitted == (Admitted(0, 0, 40, 3),)


def test_a_long_prompt_is_chunked_to_the_budget_and_goes_on_in_the_next_step():
    assert schedule(LIMITS, [], [waiting(100)], 20).admitted == (Admitted(0, 0, 64, 7),)
    row = Running(num_tokens=100, num_computed_tokens=64, num_held_blocks=7, max_num_tokens=108)
    assert schedule(LIMITS, [row], [], 13).scheduled == (Scheduled(0, 36, 0),)


def test_decodes_come_before_prefills_and_those_that_finish_before_those_that_do_not():
    long = Running(num_tokens=200, num_computed_tokens=64, num_held_blocks=13, max_num_tokens=208)
    short = Running(num_tokens=100, num_computed_tokens=64, num_held_blocks=7, max_num_tokens=108)
    decision = schedule(LIMITS, [long, short, decoding(20, 2)], [], 20)
    assert decision.scheduled == (Scheduled(2, 1, 0), Scheduled(1, 36, 0), Scheduled(0, 27, 0))


def test_a_decode_takes_a_block_exactly_where_the_last_one_is_full():
    assert schedule(LIMITS, [decoding(16, 1)], [], 5).scheduled == (Scheduled(0, 1, 0),)
    assert schedule(LIMITS, [decoding(17, 1)], [], 5).scheduled == (Scheduled(0, 1, 1),)


def test_hits_are_not_computed_but_the_last_token_is():
    assert schedule(LIMITS, [], [waiting(48, num_hits=3)], 10).admitted == (Admitted(0, 2, 16, 1),)
    assert schedule(LIMITS, [], [waiting(49, num_hits=3)], 10).admitted == (Admitted(0, 3, 1, 1),)


def test_two_equal_prompts_in_one_step_share_what_the_first_one_fills():
    limits = Limits(16, 1024, 4, 0)
    decision = schedule(limits, [], [waiting(100), waiting(100)], 20)
    assert decision.admitted == (Admitted(0, 0, 100, 7), Admitted(1, 6, 4, 1))


def test_what_a_chunk_does_not_fill_is_not_shared():
    limits = Limits(16, 80, 4, 0)
    decision = schedule(limits, [], [waiting(64), waiting(100)], 20)
    assert decision.admitted == (Admitted(0, 0, 64, 4), Admitted(1, 4, 16, 3))


def test_nobody_passes_a_prompt_that_does_not_fit():
    assert schedule(LIMITS, [], [distinct(160, 1), distinct(10, 2)], 9).admitted == ()


def test_a_prompt_waits_for_the_blocks_it_needs_to_its_end():
    # 30 tokens and 3 more of which the last is never computed: 2 blocks; one more: 3 blocks.
    assert schedule(LIMITS, [], [distinct(30, 1, out=3)], 2).admitted != ()
    assert schedule(LIMITS, [], [distinct(30, 1, out=4)], 2).admitted == ()


def test_what_running_sequences_may_still_need_is_not_given_away():
    row = decoding(20, 2, out=44)  # 63 tokens at its end: 2 more blocks
    assert schedule(LIMITS, [row], [distinct(16, 1, out=1)], 2).admitted == ()
    assert schedule(LIMITS, [row], [distinct(16, 1, out=1)], 3).admitted == (Admitted(0, 0, 16, 1),)


def test_hits_that_nobody_holds_cost_free_blocks():
    candidate = waiting(48, num_hits=2, num_free_hits=2, out=1)
    assert schedule(LIMITS, [], [candidate], 2).admitted == ()
    assert schedule(LIMITS, [], [candidate], 3).admitted == (Admitted(0, 2, 16, 1),)


def test_the_watermark_binds_new_requests_only():
    limits = Limits(16, 64, 4, watermark=2)
    assert schedule(limits, [], [distinct(16, 1, out=1)], 2).admitted == ()
    assert schedule(limits, [], [distinct(16, 1, out=1)], 3).admitted != ()
    assert schedule(limits, [decoding(17, 1)], [], 1).scheduled == (Scheduled(0, 1, 1),)


def test_rows_are_bounded():
    rows = [decoding(20, 2, out=2)] * 3
    decision = schedule(LIMITS, rows, [distinct(4, 1), distinct(4, 2)], 20)
    assert [entry.index for entry in decision.admitted] == [0]
