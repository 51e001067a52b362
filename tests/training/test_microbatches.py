"""How the rows of a generation batch are dealt out, by hand; and that the update stays TRL's."""

import pytest
import torch
from trl import GRPOTrainer

from perl.training.microbatches import (
    SCALE,
    TOKENS,
    MicroBatcher,
    Piece,
    cut_by_tokens,
    smallest_limit,
    spread,
)
from tests.trainers import make_trainer


def batch(prompts, lengths, advantages):
    """A micro-batch as TRL makes it: prompts of two tokens, completions of up to four."""
    return {
        "prompt_ids": torch.tensor([[prompt, 7] for prompt in prompts]),
        "prompt_mask": torch.ones(len(prompts), 2, dtype=torch.long),
        "completion_ids": torch.tensor([[length * 10] * length + [0] * (4 - length) for length in lengths]),
        "completion_mask": torch.tensor([[1] * length + [0] * (4 - length) for length in lengths]),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(sum(lengths)),
    }


def alone(counts):
    """Of one process, the largest count is its own."""
    return counts


def first_ids(batches):
    return [b["completion_ids"][:, 0].tolist() for b in batches]


WINDOW = [batch([1, 2], [1, 4], [0.5, -1.0]), batch([1, 2], [3, 2], [0.0, 1.0])]


def batcher(**changes):
    settings = {"loss_type": "grpo", "accumulation": 2, "leave_out_zero": False, "group": False}
    return MicroBatcher(**(settings | changes))


def test_rows_are_ordered_by_length_or_prompt_by_prompt():
    assert first_ids(batcher().arrange(WINDOW, alone)) == [[40, 30], [20, 10]]
    grouped = batcher(group=True).arrange(WINDOW, alone)
    assert first_ids(grouped) == [[40, 20], [30, 10]]  # prompt 2, which has the longest, then prompt 1
    assert grouped[0]["advantages"].tolist() == [-1.0, 1.0]
    assert [b[SCALE] for b in grouped] == [1.0, 1.0]
    assert [b[TOKENS] for b in grouped] == [8 + 10, 0]
    assert grouped[1]["num_items_in_batch"] == 5  # TRL's own


def test_rows_of_token_advantages_are_left_out_where_every_trained_token_has_none():
    window = [
        batch([1, 2], [1, 4], [[0.5] * 4, [-1.0] * 4]),
        batch([1, 2], [3, 2], [[0.0, 0.0, 0.0, 9.0], [0.0, 2.0, 0.0, 0.0]]),  # 9.0 lies behind the completion
    ]
    left = batcher(leave_out_zero=True, group=True).arrange(window, alone)
    assert first_ids(left) == [[40, 20], [10]]
    assert left[0]["advantages"].tolist() == [[-1.0] * 4, [0.0, 2.0, 0.0, 0.0]]
    assert batcher(leave_out_zero=True).share_left_out(window) == 0.25
    # one row more than it has, as another process has it: the filler has no advantage at any token
    filled = batcher(leave_out_zero=True, group=True).arrange(window, lambda counts: [max(n, 2) for n in counts])
    assert filled[1]["advantages"].tolist() == [[0.5] * 4, [0.0] * 4]


def test_rows_without_gradient_are_left_out_and_the_loss_scaled():
    left = batcher(leave_out_zero=True, group=True).arrange(WINDOW, alone)
    assert first_ids(left) == [[40, 20], [10]]
    assert [b[SCALE] for b in left] == [1.0, 0.5]  # a mean over 1 row stands for a mean over 2
    assert [b[SCALE] for b in batcher(leave_out_zero=True, loss_type="dapo").arrange(WINDOW, alone)] == [1.0, 1.0]
    assert left[0][TOKENS] == 18
    assert batcher(leave_out_zero=True).share_left_out(WINDOW) == 0.25
    assert batcher().share_left_out(WINDOW) == 0.0


def test_micro_batches_have_as_many_rows_on_every_process():
    """Another process has three rows to compute, this one has two: a row that says nothing makes up for it."""
    two = [WINDOW[0] | {"advantages": torch.tensor([0.0, -1.0])}, WINDOW[1]]
    mine = batcher(leave_out_zero=True).arrange(two, lambda counts: [2, 1])
    assert first_ids(mine) == [[40, 20], [10]]
    assert [b[SCALE] for b in mine] == [1.0, 0.5]
    assert mine[1]["completion_mask"].sum() == 0
    assert mine[1]["prompt_mask"].tolist() == [[0, 1]]  # computes one token
    assert mine[1]["advantages"].tolist() == [0.0]
    none = [b | {"advantages": b["advantages"] * 0} for b in WINDOW]
    quiet = batcher(leave_out_zero=True).arrange(none, lambda counts: [2, 1])
    assert [b[SCALE] for b in quiet] == [1.0, 0.5]
    assert [int(b["completion_mask"].sum()) for b in quiet] == [0, 0]


@pytest.mark.parametrize("leave_out_zero", [False, True])
def test_rows_whose_every_token_is_masked_are_left_out(leave_out_zero):
    """By mask_truncated_completions: neither their advantage nor their KL enters the loss."""
    masked = [b | {"completion_mask": b["completion_mask"] * torch.tensor([[1], [0]])} for b in WINDOW]
    mine = batcher(leave_out_zero=leave_out_zero).arrange(masked, alone)
    computed = [10] if leave_out_zero else [30, 10]
    assert first_ids(mine)[0] == computed
    assert [b[SCALE] for b in mine] == [len(computed) / 2, 0.0]  # of a mean over two
    assert batcher(leave_out_zero=leave_out_zero).share_left_out(masked) == 1 - len(computed) / 4


def pieces(*lengths):
    """Rows of prompts of three tokens, by (prompt, tokens of its completion); what they cost is their tokens."""
    return [Piece(row, (p,), 2, 1 + length, 2, 1 + length) for row, (p, length) in enumerate(lengths)]


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
    rows = [batch([1], [4], [1.0]), batch([1], [3], [1.0]), batch([2], [2], [1.0]), batch([2], [1], [1.0])]
    by_tokens = batcher(accumulation=4, group=True, max_tokens=10)  # 1 + 5 + 4, 1 + 3 + 2
    dealt = by_tokens.arrange(rows, alone)
    assert first_ids(dealt)[:2] == [[40, 30], [20, 10]]
    assert [b[SCALE] for b in dealt] == [2.0, 2.0, 0.0, 0.0]  # a mean over two for two means over one
    assert [int(b["prompt_mask"].sum()) for b in dealt] == [4, 4, 1, 1]
    # Another process needs three: the rows are spread over as many, of 1 + 5, 1 + 4 and 1 + 3 + 2 tokens.
    spread_out = by_tokens.arrange(rows, lambda counts: [3] if counts == [2] else [1, 1, 2, 0])
    assert [int(b["completion_mask"].any(dim=1).sum()) for b in spread_out] == [1, 1, 2, 0]
    assert [b[SCALE] for b in spread_out] == [1.0, 1.0, 2.0, 0.0]
    everything = batcher(accumulation=4, group=True, max_tokens=100, loss_type="dapo").arrange(rows, alone)
    assert [b[SCALE] for b in everything] == [1.0, 0.0, 0.0, 0.0]


def test_more_rows_than_fit_are_said_once(caplog):
    rows = [batch([1, 2], [4, 4], [1.0, 1.0]), batch([1, 2], [4, 4], [1.0, 1.0])]
    for _ in range(2):
        dealt = batcher(group=True, max_tokens=7).arrange(rows, alone)
        assert [len(b["advantages"]) for b in dealt] == [2, 2]
    assert caplog.text.count("need more than its 2 micro-batches") == 1


def test_a_window_without_any_gradient_keeps_its_micro_batches():
    zeros = [b | {"advantages": b["advantages"] * 0} for b in WINDOW]
    left = batcher(leave_out_zero=True).arrange(zeros, alone)
    assert [b[SCALE] for b in left] == [0.0, 0.0]
    assert [len(b["completion_ids"]) for b in left] == [1, 1]
    assert left[0]["completion_mask"].sum() == 0


def test_rows_stay_within_their_update():
    four = [*WINDOW, batch([1, 2], [4, 4], [1.0, 1.0]), batch([1, 2], [1, 1], [1.0, 1.0])]
    assert first_ids(batcher().arrange(four, alone)) == [[40, 30], [20, 10], [40, 40], [10, 10]]
    # 3 accumulated, 4 a generation batch: no two micro-batches surely belong together.
    assert first_ids(batcher(accumulation=3).arrange(four, alone))[0] == [40, 10]
    # Two generation batches an update: each one is within it whole.
    assert first_ids(batcher(accumulation=8).arrange(four, alone))[0] == [40, 40]


def test_fixed_micro_batches_stay():
    same = batcher(fixed="loss_type bnpo", leave_out_zero=True).arrange(WINDOW, alone)
    assert first_ids(same) == first_ids(WINDOW)
    assert [b[TOKENS] for b in same] == [4 + 5, 4 + 5]


def gradients(trainer, batches, loss):
    """Gradient of one optimizer update over `batches`, and the sum of the losses."""
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.model.train()
    trainer.model.zero_grad()
    total = 0.0
    for inputs in batches:
        value = loss(trainer, trainer.model, inputs)
        value.backward()
        total += value.item()
    return total, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("loss_type", "beta"),
    [("grpo", 0.0), ("grpo", 0.1), ("dr_grpo", 0.0), ("dapo", 0.0), ("dapo", 0.1), ("bnpo", 0.0), ("cispo", 0.0),
     ("sapo", 0.0), ("luspo", 0.0), ("vespo", 0.0)],
)  # fmt: skip
def test_the_update_is_that_of_trl_for_every_loss(tmp_path, loss_type, beta):
    """The same samples, a zero-advantage group among them, through TRL's loss on its own micro-batches and through
    ours: same sum of losses, same gradient of every weight."""
    level = "sequence" if loss_type == "luspo" else "token"
    args = {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta, "seed": 3}
    args |= {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "max_completion_length": 12}
    trainer = make_trainer(tmp_path, **args)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.05)
    trainer.state.max_steps = 1
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    theirs = trainer_batches(trainer, rows)
    ours = trainer.plan.batcher.arrange(theirs, alone)
    assert (trainer.plan.batcher.fixed is None) == (loss_type != "bnpo")
    computed = sum(len(b["advantages"]) for b in ours if b[SCALE])
    assert computed == (12 if beta == 0.0 and loss_type != "bnpo" else 16)

    plain = GRPOTrainer._get_per_token_logps_and_entropies
    hook = type(trainer)._get_per_token_logps_and_entropies
    try:
        type(trainer)._get_per_token_logps_and_entropies = plain
        expected_loss, expected = gradients(trainer, theirs, GRPOTrainer._compute_loss)
    finally:
        type(trainer)._get_per_token_logps_and_entropies = hook
    loss, found = gradients(trainer, ours, type(trainer)._compute_loss)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert max(g.abs().max() for g in expected.values()) > 1e-4
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def trainer_batches(trainer, rows):
    """TRL's micro-batches of a generation batch whose first group has the same reward throughout."""
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    made = trainer._generate_and_score_completions(rows)
    made["advantages"][:4] = 0.0
    return split_tensor_dict(shuffle_sequence_dict(made), trainer.args.steps_per_generation)
