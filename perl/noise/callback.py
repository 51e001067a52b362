"""Where in its decay AQN is: the one place that asks, before each optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from transformers import TrainerCallback

from perl.config.schema import NoiseConfig
from perl.noise.schedule import MOST_RANGE, Adapted, Stage, adapt, stage_at

log = logging.getLogger(__name__)


class NoiseStage(TrainerCallback):
    """`stage` is that of the optimizer step in progress, and of the last one until the next begins. Logs one line when
    it changes.

    Args:
        config: the group noise_injection.
        measure: called once before the first step, on every process, when the weights are where they stay.
        take_kl: the KL divergence of noisy and clean policy on the rollouts of the step that ends, in nats a token and
            the same on every process; None where none was measured. Called after each step, on every process.
    """

    def __init__(self, config: NoiseConfig, measure: Callable[[], None], take_kl: Callable[[], float | None]):
        self.config, self.measure, self.take_kl = config, measure, take_kl
        self.stage = Stage(-1, 0.0)
        self.adapted = Adapted(config.sigma_start)
        """All that target_kl knows of the rollouts before; checkpoints keep it."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.measure()

    def on_step_begin(self, args, state, control, **kwargs):
        stage = stage_at(state.global_step, state.max_steps, self.config)
        if stage.target_kl is not None:
            stage = replace(stage, sigma=self.adapted.sigma)
        if stage.index != self.stage.index and state.is_world_process_zero:
            target = "" if stage.target_kl is None else f", target KL {stage.target_kl:.3g}"
            log.info("AQN stage %d of %d: sigma %.6g%s", stage.index + 1, self.config.num_stages, stage.sigma, target)
        self.stage = stage

    def on_step_end(self, args, state, control, **kwargs):
        kl = self.take_kl()
        if kl is None or self.stage.target_kl is None:
            return
        before, lowest = self.adapted.sigma, self.config.sigma_start / MOST_RANGE
        self.adapted = adapt(self.adapted, kl, self.stage.target_kl, self.config.sigma_start)
        if self.adapted.sigma <= lowest < before and state.is_world_process_zero:
            log.warning(
                "AQN: sigma has fallen to its bound %.3g, as the KL divergence is %.2g nats a token where the target is"
                " %.2g: sampler and trainer may differ by more without noise (rounding, dropout); write a larger"
                " --config.noise_injection.target_kl_start and target_kl_end, or --config.noise_injection.schedule"
                " linear",
                lowest, kl, self.stage.target_kl,
            )  # fmt: skip
