"""How the rows of a pass without a gradient are cut, by hand; and that an update reads nothing back from its device."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perl.training.passes import PASS_TOKENS, by_area, by_tokens
from tests.trainers import make_trainer, reward_tokens


def rows(*lengths):
    """Of (prompt's name, its tokens, the completion's)."""
    return [SimpleNamespace(prompt_ids=(name,) * size, token_ids=[7] * tokens) for name, size, tokens in lengths]


def test_packed_rows_share_their_prompt():
    three = rows((1, 10, 4), (2, 10, 4), (1, 10, 4))
    assert by_tokens(three, 19) == [[0, 2], [1]]  # 9 + 2 * (1 + 4)
    assert by_tokens(three, 18) == [[0], [2], [1]]
    assert by_tokens(three, 1) == [[0], [2], [1]]
    assert by_tokens([], 1) == [[]]


def test_padded_rows_are_cut_by_their_rectangle():
    """One completion of 80 tokens and ten of 2, of one prompt: packed they are 121 tokens, padded 11 x 90."""
    many = rows((1, 10, 2), *[(1, 10, 2)] * 9, (1, 10, 80))
    assert list(by_area(many, 121)) == [[10], list(range(10))]
    assert list(by_area(many, 30)) == [[10], [0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    # The longest prompt and the longest completion are of two rows: 2 x (30 + 20).
    assert list(by_area(rows((1, 30, 1), (2, 1, 20)), 99)) == [[0], [1]]
    assert list(by_area(rows((1, 30, 1), (2, 1, 20)), 100)) == [[0, 1]]
    assert list(by_area([], 1)) == [[]]


@pytest.mark.parametrize(
    ("settings", "of_an_update", "of_a_pass"),
    [({}, 60, 60), ({"loss_type": "bnpo"}, None, PASS_TOKENS), ({"entropy_coef": 0.1}, None, PASS_TOKENS)],
)
def test_tokens_of_a_micro_batch_count_where_rows_may_change_places(tmp_path, settings, of_an_update, of_a_pass):
    step = make_trainer(tmp_path, max_tokens_per_microbatch=60, **settings).step
    assert (step.dealer.max_tokens, step.dealer.fixed) == (of_an_update, of_an_update is None)
    assert step.passes.max_tokens == of_a_pass


class NothingRead(TorchDispatchMode):
    """What makes a host wait for its device is an error: a number that is read, or a shape that depends on one."""

    READ = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        by_mask = function.overloadpacket is torch.ops.aten.index and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        assert function.overloadpacket not in self.READ, function
        assert not by_mask, function
        return function(*args, **(kwargs or {}))


SETTINGS = {
    "packed": {"beta": 0.1, "max_tokens_per_microbatch": 60, "num_iterations": 2},
    "sequence-level": {"importance_sampling_level": "sequence", "loss_type": "luspo", "off_policy_mask_threshold": 0.1},
    "vespo": {"loss_type": "vespo", "rollout": {"importance_correction": "token"}},
    "high entropies alone": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "ppo": {"algorithm": {"name": "ppo"}, "critic": {"value_clip": 0.2}, "num_generations": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_micro_batch_is_computed_without_waiting_for_its_device(tmp_path, monkeypatch, name):
    """(Where rows are padded, transformers asks its mask whether anything is.)"""
    trainer = make_trainer(tmp_path, engine="fast", rewards=[reward_tokens], **SETTINGS[name])
    loss, computed = type(trainer.step).loss, 0

    def tolist(tensor):
        raise AssertionError("a tensor is read")

    def watched(step, *args):
        nonlocal computed
        computed += 1
        with NothingRead(), monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", tolist)
            patch.setattr(torch.Tensor, "cpu", tolist)
            return loss(step, *args)

    monkeypatch.setattr(type(trainer.step), "loss", watched)
    trainer.train()
    assert computed == 4
