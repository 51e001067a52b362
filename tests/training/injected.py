"""TRL's GRPOTrainer and ours on the same injected completions; the two must learn the same.

As a program, one rank of two: python -m tests.training.injected OUT_FILE '[{"beta": 0.1}, …]', started by accelerate;
OUT_FILE gets one object for each of the settings.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from trl import GRPOTrainer

from perl.config.schema import PeftConfig
from perl.records import Completion
from tests.tiny import END, SPECIAL, WORDS
from tests.trainers import make_trainer, question, reward_tokens

LONGEST = 12


@dataclass(frozen=True)
class Learned:
    """What a run leaves: one loss and one gradient norm an optimizer step, and the adapter's tensors by name."""

    losses: list[float]
    grad_norms: list[float]
    adapter: dict[str, torch.Tensor]


def completion(rollout: int, place: int) -> list[int]:
    """Random words; ends with <|end|>, or is cut off at LONGEST where it is as long as that."""
    rng = random.Random(f"{rollout}-{place}")
    length = rng.randint(1, LONGEST + 3)
    words = [rng.randrange(len(SPECIAL), len(SPECIAL) + len(WORDS)) for _ in range(min(length, LONGEST))]
    return words if length > LONGEST else [*words[:-1], END]


def reward_with_ties(completion_ids, prompts, **kwargs):
    """`reward_tokens`, but 1 for every completion of a prompt with two or more +: such groups have no gradient."""
    tied = [prompt[-1]["content"].count("+") >= 2 for prompt in prompts]
    return [1.0 if same else number for same, number in zip(tied, reward_tokens(completion_ids), strict=True)]


def one(completions, **kwargs):
    return [1.0] * len(completions)


REWARDS = {"no ties": [reward_tokens], "ties": [reward_with_ties], "ties of a sum": [reward_with_ties, one]}


def inject(trainer: GRPOTrainer) -> None:
    """Completions of a rollout depend on its number and on the row's place among the rows of all ranks."""
    drawn = 0

    def draw(prompts) -> list[list[int]]:
        nonlocal drawn
        drawn += 1
        first = trainer.accelerator.process_index * len(prompts)
        return [completion(drawn, first + i) for i in range(len(prompts))]

    def stream(prompts):
        for place, token_ids in enumerate(draw(prompts)):
            finish = "stop" if token_ids[-1] == END else "length"
            yield place, Completion(token_ids=tuple(token_ids), finish_reason=finish)

    if isinstance(trainer, GRPOTrainer) and hasattr(trainer, "step"):
        step = trainer.step
        step.engine = step.collector.engine = step.samplers.engine = Injected(trainer.step.engine, stream)
        return
    trainer._generate_single_turn = lambda prompt_ids, *args, **kwargs: (draw(prompt_ids), None)  # type: ignore[method-assign]


class Injected:
    """An engine that gives back what is injected."""

    def __init__(self, engine, stream):
        self.engine, self.stream = engine, stream

    def __getattr__(self, name):
        return getattr(self.engine, name)


def learn(trainer_class: type[GRPOTrainer] | None, rewards: str = "no ties", **settings) -> Learned:
    """Train a tiny model with LoRA, float32, without dropout, on injected completions.

    Args:
        trainer_class: TRL's GRPOTrainer, or None for ours.
        rewards: key of REWARDS.
        settings: fields of GRPOConfig.
    """
    defaults = {
        "max_steps": 3,
        "max_completion_length": LONGEST,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "peft": PeftConfig(r=4, lora_alpha=8, lora_dropout=0.0),
        "prompts": [question("What is " + " + ".join(map(str, range(i, i + 1 + i % 4)))) for i in range(16)],
        "rewards": REWARDS[rewards],
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, kind=trainer_class, **(defaults | settings))
        inject(trainer)
        trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    return Learned(
        losses=[row["loss"] for row in steps],
        grad_norms=[row["grad_norm"] for row in steps],
        adapter={n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad},
    )


def compare(**settings) -> dict:
    mine = learn(None, **settings)  # first: it hides vLLM from TRL
    from trl import GRPOTrainer

    theirs = learn(GRPOTrainer, **settings)
    return {
        "losses": [theirs.losses, mine.losses],
        "grad_norms": [theirs.grad_norms, mine.grad_norms],
        "adapter": max((theirs.adapter[n] - mine.adapter[n]).abs().max().item() for n in theirs.adapter),
        "moved": max(t.abs().max().item() for n, t in theirs.adapter.items() if "lora_B" in n),
    }


def main() -> None:
    results = [compare(**settings) for settings in json.loads(sys.argv[2])]
    assert dist.get_world_size() == 2
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
