"""Trainers of a tiny model on sums, for every test that trains in its own process or is one rank of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from perl.adapters import ADAPTERS
from perl.config.load import Config
from perl.config.schema import (
    AlgorithmConfig,
    CommonConfig,
    CriticConfig,
    DatasetConfig,
    NoiseConfig,
    PeftConfig,
    RolloutConfig,
)
from perl.config.training import TrainingConfig
from perl.records import Prompt, Weights, row_seed
from perl.training.batch import Batch, MicroBatch
from perl.training.grpo import import_trainer
from tests.tiny import tiny_model, tiny_tokenizer

SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "beta": 0.0,
    "seed": 11,
}
"""Fields of GRPOConfig: two steps of two groups of four short completions."""


def reward_digits(completions: list, **kwargs: Any) -> list[float]:
    """Share of digits in the text: random completions differ in it, so every group has a gradient."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def reward_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """An irregular number in [0, 1) of a completion's tokens: no two completions of a group have the same."""
    return [sum((7 * i + 3) * token for i, token in enumerate(ids)) % 101 / 101 for ids in completion_ids]


def question(text: str) -> list[dict[str, str]]:
    """A conversation with one message."""
    return [{"role": "user", "content": text}]


SUMS = [question(f"What is {i} + {j} ?") for i in range(4) for j in range(4)]


def make_trainer(
    folder: Path | str,
    *,
    kind: type | None = None,
    model: Any = None,
    tokenizer: Any = None,
    prompts: Sequence[Any] = SUMS,
    dataset: Dataset | None = None,
    rewards: Sequence[Callable] = (reward_digits,),
    noise: NoiseConfig | None = None,
    adapter: str = "lora",
    peft: PeftConfig | None = None,
    engine: str = "generate",
    rollout: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    critic: dict[str, Any] | None = None,
    callbacks: Sequence[Any] = (),
    on_nonfinite: Any = "stop",
    conversations: Any = None,
    **args: Any,
) -> Any:
    """PerlGRPOTrainer with an adapter of rank 4 on `tiny_model(scale=4.0)`, without noise.

    vLLM is hidden from TRL, as in a run (perl.training.grpo.import_trainer): to import it takes longer than to train.

    Args:
        folder: the trainer's output folder.
        kind: another class: TRL's GRPOTrainer, which is given the adapter's PEFT configuration, or one of ours.
        dataset: in the place of one of `prompts` alone.
        noise, adapter, peft, engine, rollout, algorithm, critic: as in a run's configuration; the last three have the
            fields of their groups.
        on_nonfinite: as in the group `common`.
        conversations: perl.environments.conversation's, with an environment.
        args: fields of GRPOConfig that differ from SETTINGS.
    """
    training = TrainingConfig(output_dir=str(folder), **(SETTINGS | args))
    ours = import_trainer()
    kind = kind or ours
    peft = replace(peft or PeftConfig(r=4, lora_alpha=8), type=adapter)  # type: ignore[arg-type]
    extra: dict[str, Any] = {"args": training, "peft_config": ADAPTERS[adapter].build(peft)}
    if issubclass(kind, ours):
        config = Config(
            common=CommonConfig(on_nonfinite=on_nonfinite),
            dataset=DatasetConfig(max_prompt_length=None),
            peft=peft,
            noise_injection=noise or NoiseConfig(enabled=False, seed=0),
            rollout=RolloutConfig(**({"engine": engine} | (rollout or {}))),
            algorithm=AlgorithmConfig(**(algorithm or {})),
            critic=CriticConfig(**(critic or {})),
            training=training,
        )
        extra = {"config": config, "conversations": conversations}
    return kind(
        model=model or tiny_model(scale=4.0),
        train_dataset=dataset or Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer or tiny_tokenizer(),
        reward_funcs=list(rewards),
        callbacks=list(callbacks),
        **extra,
    )


class Keeping:
    """A Dealer that keeps the generation batches that it deals, each in the order of its prompts and samples."""

    def __init__(self, dealer: Any):
        self.dealer = dealer
        self.batches: list[Batch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dealer, name)

    def deal(self, batch: Batch, largest: Any) -> list[MicroBatch]:
        places = sorted(range(len(batch.rows)), key=lambda i: (batch.rows[i].position, batch.rows[i].sample))
        self.batches.append(batch.select(places))
        return self.dealer.deal(batch, largest)


def kept_batches(trainer: Any) -> list[Batch]:
    """Filled while `trainer` trains: each generation batch, as it is dealt out."""
    trainer.step.dealer = Keeping(trainer.step.dealer)
    return trainer.step.dealer.batches


def draw(trainer: Any, prompts: Sequence[Sequence[int]], group_size: int) -> list[list[int]]:
    """Completions of token ids by a rollout outside of a training, each prompt's one after the other."""
    step, sampling = trainer.step, trainer.step.collector.sampling
    step.engine.publish(Weights(version=trainer.state.global_step, sigma=step.noise_stage.stage.sigma))
    rows = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(group_size)]
    feed = [
        Prompt(
            token_ids=tuple(prompts[prompt]),
            seed=row_seed(sampling.seed, f"{trainer.state.global_step}-{prompt}", sample),
            sampling=sampling,
        )
        for prompt, sample in rows
    ]
    completions = dict(step.engine.stream(feed))
    return [list(completions[place].token_ids) for place in range(len(rows))]


def tokens_of(batch: Batch) -> list[list[int]]:
    """Each row's completion."""
    return [row.token_ids for row in batch.rows]


def move_adapter(model: Any, std: float, seed: int = 5) -> None:
    """LoRA's B is zero at first; make it N(0, std²), so that the adapter changes the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
