"""Which prompts dynamic sampling takes, and in which order."""

import itertools

import pytest

from perl.base.errors import UserError
from perl.training.prompt_stream import PromptStream


def ahead(stream, count):
    return list(itertools.islice(stream.ahead(), count))


def test_what_one_process_did_not_draw_comes_first_in_the_next_rollout():
    """Positions 0, 3, 6, 9 are process 0's, 1, 4 process 1's, 2 process 2's; the holes 5, 7, 8 are left."""
    stream = PromptStream(rows=100, seed=0)
    assert [list(itertools.islice(stream.share(rank, 3), 3)) for rank in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    stream.drawn([4, 2, 1])
    assert (stream.skipped, stream.next) == ([5, 7, 8], 10)
    assert ahead(stream, 5) == [5, 7, 8, 10, 11]
    assert list(itertools.islice(stream.share(1, 3), 2)) == [7, 11]
    assert stream.epoch == 7 / 100


def test_nothing_drawn_behind_the_holes_leaves_the_rest_of_them():
    stream = PromptStream(rows=100, seed=0)
    stream.drawn([4, 1])  # 0, 2, 4, 6 and 1
    assert (stream.skipped, stream.next) == ([3, 5], 7)
    stream.drawn([1, 0])  # 3
    assert (stream.skipped, stream.next) == ([5], 7)


@pytest.mark.parametrize("processes", [1, 3])
def test_every_prompt_once_an_epoch_whatever_each_process_draws(processes):
    stream, positions = PromptStream(rows=7, seed=5, epochs=3), []
    counts = itertools.cycle([1, 4, 2, 3, 1])
    while stream.left >= processes:
        shares = [list(stream.share(rank, processes)) for rank in range(processes)]
        drawn = [min(next(counts), len(share)) for share in shares]
        positions += [p for share, count in zip(shares, drawn, strict=True) for p in share[:count]]
        stream.drawn(drawn)
    assert sorted([*positions, *stream.ahead()]) == list(range(21))
    epochs = [[stream.row(p) for p in range(first, first + 7)] for first in (0, 7, 14)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1]
    assert [PromptStream(rows=7, seed=5).row(p) for p in range(7)] == epochs[0]
    assert [PromptStream(rows=7, seed=6).row(p) for p in range(7)] != epochs[0]


def test_the_data_sets_own_order():
    stream = PromptStream(rows=3, seed=5, shuffle=False)
    assert [stream.row(p) for p in range(6)] == [0, 1, 2, 0, 1, 2]


def test_it_ends_with_its_epochs():
    stream = PromptStream(rows=4, seed=0, epochs=1.5)
    assert (stream.left, list(stream.ahead())) == (6, [0, 1, 2, 3, 4, 5])
    stream.drawn([3, 1])
    assert (stream.left, list(stream.ahead())) == (2, [3, 5])


def test_another_number_of_processes_goes_on():
    stream, again = PromptStream(rows=9, seed=0), PromptStream(rows=9, seed=0)
    stream.drawn([3, 1])
    again.restore(stream.state())
    assert ahead(again, 4) == ahead(stream, 4) == [3, 5, 6, 7]


def test_other_rows_than_the_checkpoints():
    with pytest.raises(UserError, match="drew its prompts from 9 rows, now there are 8; give it the same"):
        PromptStream(rows=8, seed=0).restore(PromptStream(rows=9, seed=0).state())
