"""TRL's GRPOTrainer and ours on the same injected completions; the two must learn the same.

As a program, one rank of two: python -m tests.training.injected OUT_FILE '[{"beta": 0.1}, …]', started by accelerate;
OUT_FILE gets one object for each of the settings.
"""

import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from trl import GRPOTrainer

from perl.adapters import ADAPTERS
from perl.config.schema import NoiseConfig, PeftConfig
from perl.config.training import TrainingConfig
from perl.training.trainer import PerlGRPOTrainer
from tests.tiny import SPECIAL, WORDS, tiny_model, tiny_tokenizer

END = SPECIAL.index("<|end|>")
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


def reward(completion_ids, **kwargs):
    """An irregular number from a completion's tokens: no group's rewards are equal, as rounding in a zero advantage
    is the one thing in which the trainers may differ."""
    return [sum((7 * i + 3) * token for i, token in enumerate(ids)) % 101 / 101 for ids in completion_ids]


def reward_with_ties(completion_ids, prompts, **kwargs):
    """`reward`, but 1 for every completion of a prompt with two or more +: such groups have no gradient."""
    tied = [prompt[-1]["content"].count("+") >= 2 for prompt in prompts]
    return [1.0 if same else number for same, number in zip(tied, reward(completion_ids), strict=True)]


def one(completions, **kwargs):
    return [1.0] * len(completions)


REWARDS = {"no ties": [reward], "ties": [reward_with_ties], "ties of a sum": [reward_with_ties, one]}


def inject(trainer: GRPOTrainer) -> None:
    """Completions of a rollout depend on its number and on the row's place among the rows of all ranks."""
    drawn = 0

    def generate(prompt_ids, images, fields, num_generations, *args, **kwargs):
        nonlocal drawn
        drawn += 1
        first = trainer.accelerator.process_index * len(prompt_ids)
        return [completion(drawn, first + i) for i in range(len(prompt_ids))], None

    trainer._generate_single_turn = generate  # type: ignore[method-assign]


def learn(trainer_class: type[GRPOTrainer], rewards: str = "no ties", **settings) -> Learned:
    """Train a tiny model with LoRA, float32, without dropout, on injected completions.

    Args:
        rewards: key of REWARDS.
        settings: fields of GRPOConfig.
    """
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": LONGEST,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "beta": 0.0,
        "seed": 11,
    }
    prompts = [
        {"prompt": [{"role": "user", "content": "What is " + " + ".join(map(str, range(i, i + 1 + i % 4)))}]}
        for i in range(16)
    ]
    adapter, peft = ADAPTERS["lora"], PeftConfig(r=4, lora_alpha=8, lora_dropout=0.0)
    ours = {"adapter": adapter, "adapter_config": peft, "noise": NoiseConfig(enabled=False, seed=0)}
    extra = ours if issubclass(trainer_class, PerlGRPOTrainer) else {"peft_config": adapter.build(peft)}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=tiny_model(scale=4.0),
            args=TrainingConfig(output_dir=folder, **(defaults | settings)),
            train_dataset=Dataset.from_list(prompts),
            processing_class=tiny_tokenizer(),
            reward_funcs=REWARDS[rewards],
            **extra,
        )
        inject(trainer)
        trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    return Learned(
        losses=[row["loss"] for row in steps],
        grad_norms=[row["grad_norm"] for row in steps],
        adapter={n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad},
    )


def compare(**settings) -> dict:
    theirs, mine = learn(GRPOTrainer, **settings), learn(PerlGRPOTrainer, **settings)
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
