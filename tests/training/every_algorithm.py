"""A tiny training of each algorithm with all that it sets, of all weights, and of SFT.

Three optimizer steps with a checkpoint after the first. A rollout serves two of them, so that ratios are not 1 and the
checkpoint lies in the middle of a rollout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback

from perl.algorithms import ALGORITHMS
from perl.config.schema import PeftConfig
from perl.config.sft import SFTRunConfig
from perl.config.training import SFTTrainingConfig
from perl.finetuning.sft import import_trainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers import SETTINGS, SUMS, make_trainer, reward_digits, reward_tokens

ALL_WEIGHTS, SFT = "peft.type none", "sft"
RUNS = (*ALGORITHMS, ALL_WEIGHTS, SFT)


class SaveFirst(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == 1


def reward_some(prompts: list, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """reward_tokens; 1 for each completion where the first summand is even, so that half of the groups are equal."""
    even = [int(prompt[-1]["content"].split()[2]) % 2 == 0 for prompt in prompts]
    return [1.0 if same else r for same, r in zip(even, reward_tokens(completion_ids), strict=True)]


def train(name: str, folder: Path, saved: Path, resumed: bool = False, **settings: Any) -> list[dict[str, float]]:
    """The logs of the steps of one of RUNS.

    Args:
        folder: of the run; with `resumed`, where one that was not has left its checkpoint.
        saved: folder for what it has trained.
        settings: fields of the configuration that differ.
    """
    trainer = make(name, folder, **settings)
    trainer.add_callback(SaveFirst())
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1") if resumed else None)
    trainer.save_model(str(saved))
    if name in ALGORITHMS:
        trainer.save_critic(saved)
    return [row for row in trainer.state.log_history if "loss" in row]


def trained(saved: Path) -> dict[str, torch.Tensor]:
    files = sorted(saved.rglob("*.safetensors"))
    return {f"{file.name}: {name}": tensor for file in files for name, tensor in load_file(file).items()}


def make(name: str, folder: Path, **settings: Any) -> Any:
    if name == SFT:
        return _make_sft(folder, settings)
    algorithm = ALGORITHMS.get(name, ALGORITHMS["grpo"])
    groups: dict[str, dict[str, Any]] = {"algorithm": {}, "training": {}, "reward": {}}
    for flag, value in algorithm.settings.items():
        group, _, field = flag.partition(".")
        groups[group][field] = value
    fields = {"max_steps": 3, "engine": "fast", "steps_per_generation": 2 * SETTINGS["gradient_accumulation_steps"]}
    fields |= groups["training"]
    fields["algorithm"] = {"name": name if name in ALGORITHMS else "grpo"} | groups["algorithm"]
    fields["rewards"] = [reward_some] if "dynamic_sampling" in groups["algorithm"] else [reward_tokens]
    if name == "gdpo":
        fields["rewards"] = [reward_tokens, reward_digits]  # each is normalized by itself
    if algorithm.critic:
        fields |= {"critic": {"lr": 1e-2, "r": 4}, "max_grad_norm": 1e9}  # DeepSpeed clips policy and critic together
    if name == ALL_WEIGHTS:
        fields |= {"adapter": "none", "learning_rate": 1e-3}
    return make_trainer(folder, **(fields | settings))


def _make_sft(folder: Path, settings: dict[str, Any]) -> Any:
    ours = {name: value for name, value in SETTINGS.items() if name not in ("num_generations", "beta")}
    ours.pop("max_completion_length")
    answers = [[{"role": "assistant", "content": str(i + j)}] for i in range(4) for j in range(4)]
    peft = PeftConfig(r=4, lora_alpha=8)
    training = SFTTrainingConfig(output_dir=str(folder), **(ours | {"max_steps": 3} | settings))
    return import_trainer()(
        SFTRunConfig(peft=peft, training=training),
        model=tiny_model(scale=4.0),
        train_dataset=Dataset.from_dict({"prompt": SUMS, "completion": answers}),
        processing_class=tiny_tokenizer(),
    )
