"""How the rows of a generation batch are dealt out, by hand. That the update stays TRL's is in test_equal_to_trl."""

import dataclasses

import pytest
import torch

from perl.records import Trajectory
from perl.training.batch import Batch, Cycle, Dealer, MicroBatch, RowCost, cut_by_tokens, smallest_limit, spread


def batch(prompts, lengths, advantages, **changes):
    """Prompts of two tokens; completions of so many."""
    rows = [
        Trajectory(
            row={"prompt": "?"},
            position=place,
            sample=0,
            prompt_ids=(prompt, 7),
            token_ids=[length * 10] * length,
            sampled=[True] * length,
            finish="stop",
        )
        for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    made = Batch.of(rows, torch.device("cpu"), False, max(lengths), logprobs=False)
    advantages = torch.tensor(advantages)
    made.advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    return dataclasses.replace(made, **changes)


def alone(counts):
    """Of one process, the largest count is its own."""
    return counts


def first_ids(micro_batches):
    return [
        [] if each.batch is None or each.padding else [row.token_ids[0] for row in each.batch.rows]
        for each in micro_batches
    ]


WINDOW = batch([1, 2, 1, 2], [1, 4, 3, 2], [0.5, -1.0, 0.0, 1.0])


def dealer(**changes):
    cycle = {name: changes.pop(name, 2) for name in ("accumulation", "per_generation")}
    return Dealer(**({"cycle": Cycle(**cycle), "leave_out_zero": False, "group": False} | changes))


def test_columns_of_rows_that_are_lists():
    of_row = {"row": {"prompt": "?", "other": object()}, "position": 0, "prompt_ids": (5,)}
    rows = [
        Trajectory(sample=0, token_ids=[6, 7, 8], sampled=[True, False, True], logprobs=[-0.5, -1.0, -2.0], **of_row),
        Trajectory(sample=1, token_ids=[9], sampled=[True], logprobs=[-0.25], finish="stop", **of_row),
    ]
    rows[0].extras = {"logged": object()}
    made = Batch.of(rows, torch.device("cpu"), mask_truncated=False, longest=3, logprobs=True)
    assert made.mask.tolist() == [[True, False, True], [True, False, False]]
    assert made.sampler.tolist() == [[-0.5, -1.0, -2.0], [-0.25, 0.0, 0.0]]
    masked = Batch.of(rows, torch.device("cpu"), mask_truncated=True, longest=4, logprobs=False).mask
    assert masked.tolist() == [[False] * 4, [True, False, False, False]]
    again = Batch.restored(made.state())
    assert [(row.prompt_ids, row.token_ids, row.sampled) for row in again.rows] == [
        (row.prompt_ids, row.token_ids, row.sampled) for row in rows
    ]
    assert torch.equal(again.mask, made.mask)
    assert [(row.row, row.extras) for row in again.rows] == [({"prompt": "?"}, {})] * 2  # plain values alone
    assert [row.sample for row in made.select([1, 0]).rows] == [1, 0]


def test_rows_are_ordered_by_length_or_prompt_by_prompt():
    assert first_ids(dealer().deal(WINDOW, alone)) == [[40, 30], [20, 10]]
    grouped = dealer(group=True).deal(WINDOW, alone)
    assert first_ids(grouped) == [[40, 20], [30, 10]]  # prompt 2, which has the longest, then prompt 1
    assert grouped[0].batch.advantages.tolist() == [[-1.0], [1.0]]
    assert [each.trained_tokens for each in grouped] == [8 + 10, 0]


def test_rows_of_token_advantages_are_left_out_where_every_trained_token_has_none():
    tokens = [[0.5] * 4, [-1.0] * 4, [0.0, 0.0, 0.0, 9.0], [0.0, 2.0, 0.0, 0.0]]  # 9.0 lies behind the completion
    window = batch([1, 2, 1, 2], [1, 4, 3, 2], tokens)
    left = dealer(leave_out_zero=True, group=True).deal(window, alone)
    assert first_ids(left) == [[40, 20], [10]]
    assert dealer(leave_out_zero=True).computed(window).tolist() == [True, True, False, True]


def test_rows_without_gradient_are_left_out():
    left = dealer(leave_out_zero=True, group=True).deal(WINDOW, alone)
    assert first_ids(left) == [[40, 20], [10]]
    assert left[0].trained_tokens == 18
    assert dealer().computed(WINDOW).all()


def test_a_process_with_fewer_rows_takes_part_with_a_token():
    """Another process has rows for both micro-batches, this one for the first alone."""
    two = dataclasses.replace(WINDOW, advantages=torch.tensor([[0.0], [-1.0], [0.0], [1.0]]))
    local = dealer(leave_out_zero=True).deal(two, lambda counts: [2])
    assert first_ids(local) == [[40, 20], []]
    assert local[1].padding
    assert [(row.prompt_ids, row.token_ids) for row in local[1].batch.rows] == [((7,), [])]


def test_padding_of_a_row_with_images_has_them():
    """Where weights are split, other processes wait in the vision tower for one that skips it."""
    rows = [dataclasses.replace(row, images=(b"image",)) for row in WINDOW.rows]
    quiet = dataclasses.replace(WINDOW, rows=rows, advantages=torch.zeros(4, 1))
    (row,) = dealer(leave_out_zero=True).deal(quiet, alone)[1].batch.rows
    assert (row.prompt_ids, row.token_ids, row.images) == ((1, 7), [], (b"image",))


def test_a_window_without_any_gradient_makes_its_step_all_the_same():
    """The optimizer's momentum and decay go on: one micro-batch, of one token."""
    quiet = dealer(leave_out_zero=True).deal(dataclasses.replace(WINDOW, advantages=torch.zeros(4, 1)), alone)
    assert [each.batch is None for each in quiet] == [True, False]
    assert quiet[1].padding


def test_a_checkpoint_says_which_micro_batch_is_padding():
    padding = MicroBatch(None, padding=True, trained_tokens=3)
    assert MicroBatch.restored(padding.state()) == padding


@pytest.mark.parametrize("leave_out_zero", [False, True])
def test_rows_whose_every_token_is_masked_are_left_out(leave_out_zero):
    """By mask_truncated_completions: neither their advantage nor their KL enters the loss."""
    mask = WINDOW.mask & torch.tensor([[True], [False], [True], [False]])
    dealt = dealer(leave_out_zero=leave_out_zero).deal(dataclasses.replace(WINDOW, mask=mask), alone)
    assert first_ids(dealt) == [[], [10] if leave_out_zero else [30, 10]]


def pieces(*lengths):
    """Rows of prompts of three tokens, by (prompt, tokens of its completion); what they cost is their tokens."""
    return [RowCost(row, (p,), 2, 1 + length, 2, 1 + length) for row, (p, length) in enumerate(lengths)]


def test_rows_are_cut_where_the_packed_sequence_would_be_too_long():
    three = pieces((1, 4), (1, 3), (2, 9), (2, 1))  # 2 + 5 | 4 || 2 + 10 | 2
    assert cut_by_tokens(three, 11) == [[0, 1], [2], [3]]  # the third is too long by itself
    assert cut_by_tokens(three, 14) == [[0, 1], [2, 3]]
    assert cut_by_tokens(three, 25) == [[0, 1, 2, 3]]
    assert cut_by_tokens(three, 25, max_cost=12) == [[0, 1], [2], [3]]
    assert smallest_limit(three, 11, 3) == 11
    assert smallest_limit(three, 5, 2) == 14
    assert smallest_limit(three, 5, 1) == 25
    assert smallest_limit([], 5, 1) == 5
    even = pieces((1, 3), (1, 3), (1, 3), (1, 3))
    assert cut_by_tokens(even, 14) == [[0, 1, 2], [3]]
    assert spread(even, 14, 2) == [[0, 1], [2, 3]]  # no dearer than it must be
    assert spread([], 14, 2) == []


def test_micro_batches_by_tokens():
    rows = batch([1, 1, 2, 2], [4, 3, 2, 1], [1.0, 1.0, 1.0, 1.0])
    by_tokens = dealer(accumulation=4, per_generation=4, group=True, max_tokens=10)  # 1 + 5 + 4, 1 + 3 + 2
    dealt = by_tokens.deal(rows, alone)
    assert [each.batch is None for each in dealt] == [True, True, False, False]  # the last one exchanges gradients
    assert first_ids(dealt) == [[], [], [40, 30], [20, 10]]
    assert [each.trained_tokens for each in dealt] == [18, 0, 0, 0]
    # Another process needs three: the rows are spread over as many, of 1 + 5, 1 + 4 and 1 + 3 + 2 tokens.
    assert first_ids(by_tokens.deal(rows, lambda counts: [3])) == [[], [40], [30], [20, 10]]
    everything = dealer(accumulation=4, per_generation=4, group=True, max_tokens=100).deal(rows, alone)
    assert first_ids(everything) == [[], [], [], [40, 30, 20, 10]]


def test_more_rows_than_fit_are_said_once(caplog):
    rows = batch([1, 2, 1, 2], [4, 4, 4, 4], [1.0, 1.0, 1.0, 1.0])
    for _ in range(2):
        dealt = dealer(group=True, max_tokens=7).deal(rows, alone)
        assert [len(each.batch.rows) for each in dealt] == [2, 2]
    assert caplog.text.count("need more than its 2 micro-batches") == 1


def test_rows_stay_within_their_update():
    four = batch([1, 2] * 4, [1, 4, 3, 2, 4, 4, 1, 1], [1.0] * 8)
    assert first_ids(dealer(per_generation=4).deal(four, alone)) == [[40, 30], [20, 10], [40, 40], [10, 10]]
    # 3 accumulated, 4 a generation batch: no two micro-batches surely belong together.
    assert first_ids(dealer(accumulation=3, per_generation=4).deal(four, alone))[0] == [40, 10]
    # Two generation batches an update: each one is within it whole.
    assert first_ids(dealer(accumulation=8, per_generation=4).deal(four, alone))[0] == [40, 40]


def test_fixed_micro_batches_stay():
    same = dealer(fixed=True, leave_out_zero=True).deal(WINDOW, alone)
    assert first_ids(same) == [[10, 40], [30, 20]]
    assert [each.trained_tokens for each in same] == [4 + 5, 4 + 5]


def test_a_generation_batch_is_drawn_for_each_cycle():
    """Three micro-batches, trained on twice; an update takes four."""
    cycle = Cycle(accumulation=4, per_generation=3, iterations=2)
    assert [m for m in range(20) if cycle.begins(m)] == [0, 6, 12, 18]
    assert [cycle.place(m) for m in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    # Updates begin with 0, 4, 8, 12: the second has 6 within; that with 12 begins with a batch, and has none within.
    assert [cycle.begins_amid_update(first) for first in (0, 4, 8, 12)] == [False, True, False, False]
    assert cycle.several_updates
    assert not Cycle(accumulation=4, per_generation=2).several_updates


def test_the_batches_that_are_left_of_a_run():
    """Of an epoch of ten micro-batches the third update has two."""
    cycle = Cycle(accumulation=4, per_generation=3)
    left = cycle.batches_left
    assert left(step=0, last=3, made=0, epoch=10) == 4  # 10 micro-batches by 3
    assert left(step=1, last=3, made=0, epoch=10) == 2  # 6 are left
    assert left(step=1, last=3, made=2, epoch=10) == 2  # 4
    assert left(step=3, last=5, made=0, epoch=10) == 3  # 8 of the second epoch
    assert left(step=5, last=5, made=0, epoch=10) == 1  # one is drawn where the count has ended
