"""Where in its decay AQN is: the one place that asks, before each optimizer step."""

from __future__ import annotations

import logging

from transformers import TrainerCallback

from perl.config.schema import NoiseConfig
from perl.noise.schedule import Stage, stage_at

log = logging.getLogger(__name__)


class NoiseStage(TrainerCallback):
    """`stage` is that of the optimizer step in progress, and of the last one until the next begins. Logs one line when
    it changes."""

    def __init__(self, config: NoiseConfig):
        self.config = config
        self.stage = Stage(-1, 0.0)

    def on_step_begin(self, args, state, control, **kwargs):
        stage = stage_at(state.global_step, state.max_steps, self.config)
        if stage != self.stage and state.is_world_process_zero:
            log.info("AQN stage %d of %d: sigma %.6g", stage.index + 1, self.config.num_stages, stage.sigma)
        self.stage = stage
