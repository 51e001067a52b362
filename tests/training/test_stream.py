"""The order in which a run takes its prompts: TRL's."""

import pytest
from trl.trainer.utils import RepeatSampler

from perl.base.errors import UserError
from perl.training.stream import PromptStream


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_that_of_trls_sampler_epoch_after_epoch(shuffle):
    """Eleven rows in batches of four: TRL leaves three of each epoch out, other ones each time."""
    sampler = RepeatSampler(range(11), mini_repeat_count=1, batch_size=4, repeat_count=1, shuffle=shuffle, seed=5)
    expected = [row for _ in range(3) for row in sampler]
    stream = PromptStream(rows=11, batch=4, seed=5, shuffle=shuffle)
    assert len(expected) == 3 * stream.per_epoch == 24
    assert [stream.row(position) for position in range(24)] == expected
    if shuffle:
        assert expected[:8] != expected[8:16]
        assert [PromptStream(rows=11, batch=4, seed=6).row(position) for position in range(8)] != expected[:8]


def test_it_ends_with_its_epochs():
    stream = PromptStream(rows=9, batch=4, seed=0, epochs=1.5)
    assert (stream.left, stream.epoch) == (12, 0.0)
    stream.next = 10
    assert (stream.left, stream.epoch) == (2, 1.25)
    assert PromptStream(rows=9, batch=4, seed=0).left == float("inf")


def test_a_checkpoint_goes_on_whatever_the_number_of_processes():
    stream, again = PromptStream(rows=9, batch=3, seed=0), PromptStream(rows=9, batch=3, seed=0)
    stream.next, stream.equal_share = 5, 0.25
    again.restore(stream.state())
    assert (again.next, again.equal_share) == (5, 0.25)


def test_other_rows_than_the_checkpoints():
    with pytest.raises(UserError, match="drew its prompts from 9 rows, now there are 8; give it the same"):
        PromptStream(rows=8, batch=2, seed=0).restore(PromptStream(rows=9, batch=3, seed=0).state())
