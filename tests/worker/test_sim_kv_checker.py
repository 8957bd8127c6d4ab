"""Every rule of the KV checker: what breaks it is caught, what comes close to it is not."""

from dataclasses import replace

import pytest
from sim_driver import SMALL, SimDriver
from sim_tokens import token_at

from worker_svc.sim.violations import Rule

_FIVE = [10, 11, 12, 13, 14]


@pytest.fixture
def worker() -> SimDriver:
    """Row 0 has five tokens and a sampled one, in blocks 1 and 2."""
    worker = SimDriver()
    worker.run(admissions=[(0, _FIVE, 0, [1, 2])], scheduled=[(0, 5)])
    return worker


@pytest.mark.parametrize(("epoch", "step"), [(1, 1), (2, 1), (0, 2)])
def test_epochs_and_steps_go_up(worker: SimDriver, epoch: int, step: int) -> None:
    worker.refuses(Rule.ORDER, epoch=epoch, step=step)


@pytest.mark.parametrize("rows", [[1], [0, 0], [99]])
def test_only_held_rows_are_released(worker: SimDriver, rows: list[int]) -> None:
    assert worker.refuses(Rule.RELEASE, release=rows).row == rows[-1]


@pytest.mark.parametrize("rows", [[0], [1, 1], [99]])
def test_only_free_rows_are_admitted(worker: SimDriver, rows: list[int]) -> None:
    admissions = [(row, [1, 2], 0, [3 + i]) for i, row in enumerate(rows)]
    assert worker.refuses(Rule.ADMISSION, admissions=admissions).row == rows[-1]


def test_a_row_released_and_admitted_in_one_plan(worker: SimDriver) -> None:
    worker.run(release=[0], admissions=[(0, [7, 8], 0, [1])], scheduled=[(0, 2)])
    assert worker.runner.kv_checker.violations == []


def test_a_row_is_scheduled_once(worker: SimDriver) -> None:
    assert worker.refuses(Rule.SCHEDULE, scheduled=[(0, 1), (0, 1)]).row == 0


@pytest.mark.parametrize(("block", "rule"), [(0, Rule.NULL_BLOCK), (8, Rule.BLOCK_RANGE)])
def test_blocks_are_those_of_the_pool(worker: SimDriver, block: int, rule: Rule) -> None:
    for plan in (
        {"admissions": [(1, _FIVE, 0, [3, block])]},
        {"appends": [(0, [block])]},
        {"swap_outs": [(block, 0)]},
        {"swap_ins": [(0, block)]},
        {"copies": [(1, block)]},
        {"copies": [(block, 3)]},
    ):
        assert worker.refuses(rule, **plan).block == block


def test_host_blocks_are_those_of_the_host(worker: SimDriver) -> None:
    assert worker.refuses(Rule.BLOCK_RANGE, swap_outs=[(1, 3)]).block == 3
    assert worker.refuses(Rule.BLOCK_RANGE, swap_ins=[(3, 1)]).block == 3


@pytest.mark.parametrize(
    "plan",
    [
        {"admissions": [(1, [1, 2], 0, [2])]},
        {"appends": [(0, [1])]},
        {"appends": [(0, [3, 3])]},
        {"admissions": [(1, [1, 2], 0, [3]), (2, [1, 2], 0, [3])]},
        # A computed prefix takes the right block, its continuation the wrong one.
        {"admissions": [(1, _FIVE, 4, [1, 2])], "scheduled": [(1, 1)]},
    ],
)
def test_fresh_blocks_are_in_no_other_table(worker: SimDriver, plan: dict[str, object]) -> None:
    assert worker.refuses(Rule.FRESH_BLOCK, **plan).block in (1, 2, 3)


def test_a_shared_block_is_not_written(worker: SimDriver) -> None:
    # The sibling counts the half-filled block as its own instead of copying it.
    worker.run(admissions=[(1, [*_FIVE, 99], 5, [1, 2])])
    found = worker.refuses(Rule.SHARED_BLOCK, scheduled=[(0, 1)])
    assert (found.row, found.block, found.slot) == (0, 2, 9)


def test_two_rows_of_one_plan_do_not_write_one_slot() -> None:
    worker = SimDriver()
    admissions = [(0, _FIVE, 0, [1, 2]), (1, _FIVE, 3, [1, 3])]
    assert worker.refuses(Rule.SLOT, admissions=admissions, scheduled=[(0, 5), (1, 2)]).slot == 7


def test_only_written_slots_are_read(worker: SimDriver) -> None:
    found = worker.refuses(Rule.UNWRITTEN, admissions=[(1, _FIVE, 4, [3, 4])], scheduled=[(1, 1)])
    assert (found.row, found.slot, found.block) == (1, 12, 3)


@pytest.mark.parametrize("tokens", [[10, 11, 99, 13, 14], [11, 10, 12, 13, 14]])
def test_another_prefix_is_not_read(worker: SimDriver, tokens: list[int]) -> None:
    found = worker.refuses(Rule.FOREIGN, admissions=[(1, tokens, 4, [1, 3])], scheduled=[(1, 1)])
    assert found.slot == 4 + next(i for i, t in enumerate(tokens) if t != _FIVE[i])


def test_a_prefix_is_its_blocks_in_order() -> None:
    worker = SimDriver()
    worker.run(admissions=[(0, [5] * 9, 0, [1, 2, 3])], scheduled=[(0, 9)])
    # Equal tokens, but at other positions.
    worker.refuses(Rule.FOREIGN, admissions=[(1, [5] * 9, 8, [2, 1, 4])], scheduled=[(1, 1)])


def test_reused_blocks_lose_their_prefix(worker: SimDriver) -> None:
    worker.run(release=[0], admissions=[(1, [20, 21, 22, 23], 0, [1])], scheduled=[(1, 4)])
    worker.refuses(Rule.FOREIGN, admissions=[(0, _FIVE, 4, [1, 3])], scheduled=[(0, 1)])


def test_prefixes_are_shared_in_later_plans_and_in_the_plan_that_fills_them() -> None:
    worker = SimDriver()
    both = [(0, _FIVE, 0, [1, 2]), (1, [*_FIVE[:4], 77], 4, [1, 3])]
    worker.run(admissions=both, scheduled=[(0, 5), (1, 1)])
    worker.run(admissions=[(2, _FIVE, 4, [1, 4])], scheduled=[(0, 1), (1, 1), (2, 1)])
    # A block that the plan does not fill must not be shared.
    unfilled = [(0, _FIVE, 0, [5, 6]), (1, _FIVE, 4, [5, 7])]
    worker.refuses(
        Rule.UNWRITTEN, release=[0, 1, 2], admissions=unfilled, scheduled=[(0, 3), (1, 1)]
    )


def test_blocks_outlive_their_rows_and_lanes(worker: SimDriver) -> None:
    [token] = worker.run(scheduled=[(0, 1)]).sampled_token_ids
    worker.runner.clear()
    # The sampled tokens among them: the one at position 5 and, not computed yet, the one behind.
    tokens = [*_FIVE, token_at(0, 5, SMALL.vocab_size), token]
    worker.run(epoch=2, admissions=[(3, tokens, 6, [1, 2])], scheduled=[(3, 1)])
    assert worker.runner.kv_checker.violations == []


def test_a_fork_copies_the_block_it_will_write(worker: SimDriver) -> None:
    # The parent goes on in its own block meanwhile, and in the same plan.
    worker.run(scheduled=[(0, 1)])
    worker.run(admissions=[(1, _FIVE, 4, [1, 3])], copies=[(2, 3)], scheduled=[(0, 1), (1, 1)])
    worker.run(scheduled=[(0, 1), (1, 1)])
    assert worker.runner.kv_checker.violations == []


def test_sources_of_copies_are_read_before_destinations_are_written() -> None:
    worker = SimDriver()
    worker.run(admissions=[(0, [1, 2, 3, 4], 0, [1])], scheduled=[(0, 4)])
    worker.run(admissions=[(1, [5, 6, 7, 8], 0, [2])], scheduled=[(1, 4)])
    worker.run(release=[0, 1], copies=[(1, 2), (2, 1)])
    exchanged = [(0, [5, 6, 7, 8, 9], 4, [1, 3]), (1, [1, 2, 3, 4, 9], 4, [2, 4])]
    worker.run(admissions=exchanged, scheduled=[(0, 1), (1, 1)])


def test_swaps_carry_contents(worker: SimDriver) -> None:
    worker.run(release=[0], swap_outs=[(1, 0), (2, 2)])
    worker.run(admissions=[(1, [1] * 8, 0, [1, 2])], scheduled=[(1, 8)])
    back = [(0, [*_FIVE, 50], 5, [5, 6])]
    worker.run(admissions=back, swap_ins=[(0, 5), (2, 6)], scheduled=[(0, 1)])


def test_a_swap_that_mixes_blocks_up_is_seen(worker: SimDriver) -> None:
    worker.run(release=[0], swap_outs=[(1, 0), (2, 2)])
    worker.refuses(
        Rule.FOREIGN, admissions=[(0, [*_FIVE, 50], 5, [5, 6])], swap_ins=[(0, 6), (2, 5)]
    )


def test_only_written_host_blocks_are_swapped_in(worker: SimDriver) -> None:
    assert worker.refuses(Rule.UNWRITTEN_HOST, swap_ins=[(1, 3)]).block == 1


def test_a_plan_swaps_in_one_direction(worker: SimDriver) -> None:
    worker.run(swap_outs=[(1, 0)])
    worker.refuses(Rule.SWAP_DIRECTION, swap_outs=[(2, 1)], swap_ins=[(0, 3)])


@pytest.mark.parametrize(
    "plan", [{"copies": [(1, 3), (2, 3)]}, {"copies": [(2, 1)]}, {"swap_outs": [(1, 0), (2, 0)]}]
)
def test_blocks_move_to_free_places(worker: SimDriver, plan: dict[str, object]) -> None:
    assert worker.refuses(Rule.MOVE_TARGET, **plan).block in (0, 1, 3)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"scheduled": [(2, 1)]}, "no sequence"),
        ({"scheduled": [(99, 1)]}, "no such row"),
        ({"scheduled": [(0, 2)]}, "more tokens scheduled than known"),
        ({"admissions": [(1, [1] * 13, 0, [3, 4, 5, 6])], "scheduled": [(1, 13)]}, "at most 12"),
        ({"admissions": [(1, _FIVE, 0, [3])], "scheduled": [(1, 5)]}, "without a block"),
        ({"appends": [(0, [3, 4, 5])]}, "row 0: 5 blocks, its table has fewer"),
        ({"appends": [(2, [3])]}, "row 2 holds no sequence"),
        ({"appends": [(0, [3]), (0, [4])]}, "a row gets blocks twice"),
        ({"admissions": [(1, _FIVE, 5, [1, 2])]}, "no token left"),
    ],
)
def test_errors_of_the_tables_are_recorded(
    worker: SimDriver, plan: dict[str, object], words: str
) -> None:
    assert words in str(worker.refuses(Rule.TABLES, **plan))


def test_a_running_row_fills_a_block_of_a_row_admitted_in_the_same_plan() -> None:
    worker = SimDriver()
    worker.run(admissions=[(0, list(range(1, 10)), 0, [1, 2, 3])], scheduled=[(0, 3)])
    worker.run(admissions=[(1, [*range(1, 9), 50], 8, [1, 2, 4])], scheduled=[(0, 6), (1, 1)])
    assert worker.runner.kv_checker.violations == []


@pytest.mark.parametrize("acceptance_rate", [0.0, 1.0])
def test_slots_of_rejected_drafts_hold_another_prefix(acceptance_rate: float) -> None:
    """So that blocks with such slots cannot be published unnoticed."""
    model = replace(SMALL, num_speculative_tokens=3, acceptance_rate=acceptance_rate)
    worker = SimDriver(model)
    worker.run(admissions=[(0, _FIVE, 0, [1, 2])], scheduled=[(0, 5)])
    # The blocks have room for two drafts behind the sixth token.
    output = worker.run(scheduled=[(0, 1)], lookahead=3)
    assert output.num_draft_tokens == [1, 1]
    assert output.num_accepted_tokens == ([1, 1] if acceptance_rate else [])
    assert output.num_computed_tokens == [8 if acceptance_rate else 6]
    whole = [*_FIVE, *(token_at(0, position, 1000) for position in range(5, 9))]
    admitted = {"release": [0], "scheduled": [(1, 1)]}
    if acceptance_rate:
        worker.run(admissions=[(1, whole, 8, [1, 2, 3])], **admitted)
    else:
        worker.refuses(Rule.FOREIGN, admissions=[(1, whole, 8, [1, 2, 3])], **admitted)


def test_slots_of_rejected_drafts_are_written_again() -> None:
    worker = SimDriver(replace(SMALL, num_speculative_tokens=3))
    worker.run(admissions=[(0, _FIVE, 0, [1, 2])], scheduled=[(0, 5)])
    for _ in range(3):
        worker.run(scheduled=[(0, 1)], lookahead=3)
    whole = [*_FIVE, *(token_at(0, position, 1000) for position in range(5, 9))]
    worker.run(release=[0], admissions=[(1, whole, 8, [1, 2, 3])], scheduled=[(1, 1)])
