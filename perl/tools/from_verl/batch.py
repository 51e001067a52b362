"""verl's batch arithmetic, in the terms of TRL."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class BatchError(Exception):
    """A batch that cannot be cut as verl's keys say."""

    key: str
    why: str


@dataclass(frozen=True)
class Batch:
    """One step of verl: `prompts_per_rollout` prompts are completed `n` times each, then the completions are trained
    on in updates of `prompts_per_update` prompts. Counts are over all devices unless they say otherwise."""

    devices: int
    prompts_per_rollout: int
    prompts_per_update: int
    n: int
    epochs: int
    """Passes over the completions of a rollout (ppo_epochs)."""
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps in a step of verl."""
        return self.prompts_per_rollout // self.prompts_per_update * self.epochs

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "completions_per_rollout": self.prompts_per_rollout * self.n,
            "completions_per_update": self.prompts_per_update * self.n,
            "updates_per_rollout": self.updates_per_rollout,
        }


PROMPTS = "data.train_batch_size"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
N = "actor_rollout_ref.rollout.n"
DEVICES = "trainer.n_gpus_per_node"


def make_batch(devices: int, prompts: int, mini: int, micro: int | None, n: int, epochs: int) -> Batch:
    """Cut verl's batch.

    Args:
        devices: D, processes, each with its own share of the completions.
        prompts: data.train_batch_size.
        mini: ppo_mini_batch_size, in prompts.
        micro: ppo_micro_batch_size_per_gpu, in completions; None takes a device's share of an update whole.
        n: completions of each prompt.
        epochs: ppo_epochs.

    Raises:
        BatchError: something does not divide, which verl asserts too.
    """
    for key, value in ((PROMPTS, prompts), (MINI, mini), (N, n), (DEVICES, devices), (MICRO, micro)):
        if value is None and key == MICRO:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BatchError(key, f"{value!r}: must be a whole number from 1")
    if prompts % mini:
        raise BatchError(MINI, f"{mini} does not divide the {prompts} prompts of a rollout ({PROMPTS})")
    if (mini * n) % devices:
        raise BatchError(MINI, f"{mini} prompts x {n} completions do not divide over {devices} devices")
    share = mini * n // devices
    micro = micro or share
    if share % micro:
        raise BatchError(
            MICRO, f"{micro} does not divide the {share} completions that a device has of an update ({mini} x {n} /"
            f" {devices})"
        )  # fmt: skip
    return Batch(
        devices=devices,
        prompts_per_rollout=prompts,
        prompts_per_update=mini,
        n=n,
        epochs=epochs,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        steps_per_generation=prompts * n // (devices * micro),
    )
