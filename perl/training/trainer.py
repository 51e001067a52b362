"""TRL's GRPOTrainer around a step of our own (perl.training.step): it brings the arguments, the model's set-up, the
loop, the optimizer, the log and the checkpoints. Where its loop asks for something, this file answers:

    training_step      the next micro-batch          Step.batch, once a generation batch
    compute_loss       its loss                      Step.loss
    _evaluate          scores while it trains        validation.Validation
    create_optimizer, _clip_grad_norm                the critic's weights are a group of their own
    log, _save_own, …                                what is measured, and what a resumed run must know

This file, policy.py (the model that it holds) and assembly.py (the step's parts, made of what it has set up) alone know
TRL's internals.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer, TrainerCallback
from trl import GRPOTrainer

from perl.adapters import ADAPTERS
from perl.adapters.start import own_precision
from perl.config.load import Config
from perl.config.training import TrainingConfig
from perl.environments.conversation import Conversations
from perl.noise.callback import NoiseStage
from perl.noise.injector import NoiseInjector
from perl.noise.schedule import Adapted
from perl.noise.size import size_metrics, size_warning
from perl.prompts import ChatTemplate
from perl.records import Weights
from perl.rewards.functions import GradeEarly
from perl.runs.adapter_trainer import AdapterTrainer, WriteCard
from perl.runs.metrics import StepClock, add_step, model_size
from perl.runs.nonfinite import save_batch
from perl.runs.process_state import ProcessState, RolloutState
from perl.runs.vision import language_part
from perl.training.assembly import make_step
from perl.training.batch import Batch, MicroBatch
from perl.training.loss import masked_mean
from perl.training.metrics import completions_of
from perl.training.policy import Policy
from perl.training.pool import PoolLost
from perl.training.validation import Validation

log = logging.getLogger(__name__)


class PerlGRPOTrainer(AdapterTrainer, GRPOTrainer):
    """GRPO on a LoRA adapter or on all weights, sampled with noise on the norm weights.

    Args (besides GRPOTrainer's):
        config: the run's; config.training are GRPOTrainer's `args`.
        grade_early: asked for each completion as soon as it ends, while others are drawn.
        conversations: how completions of several turns are made, with an environment; None: of one turn.
        validation: what is asked for scores while the model trains.
        write_card: writes the model card into a folder that holds what was trained, given the log history; None: none
            is written.
    """

    args: TrainingConfig

    def __init__(
        self,
        config: Config,
        *,
        model: Any,
        processing_class: Any,
        grade_early: GradeEarly | None = None,
        conversations: Conversations | None = None,
        validation: Validation | None = None,
        write_card: WriteCard | None = None,
        **kwargs: Any,
    ):
        self.config, training = config, config.training
        wrapped = isinstance(model, PeftModel)  # its adapter is trained further
        peft = language_part(config.peft, processing_class)
        peft_config = model.peft_config["default"] if wrapped else ADAPTERS[peft.type].build(peft)
        refers = bool(training.beta or config.algorithm.kl_in_reward > 0.0)
        if wrapped and refers:
            copy_adapter(model, "ref")
        generation_kwargs: Any = training.generation_kwargs or {}
        of_torch = None if training.use_vllm else generation_kwargs  # vLLM's have names of their own
        with (
            changed(training, beta=0.0, use_vllm=False, generation_kwargs=of_torch),  # reference and engine are ours
            own_precision(model, None if wrapped else peft_config, training.seed) as (model, of_trl),
        ):
            super().__init__(
                model=model, args=training, processing_class=processing_class, peft_config=of_trl, **kwargs
            )
        self.start_adapter(peft, write_card, config.common.on_nonfinite)
        self.policy, noise = Policy(self, refers), config.noise_injection
        self.noise = NoiseInjector.of(self.policy.bare, noise) if noise.enabled else None
        gather, workers = self.accelerator.gather, config.rollout.workers
        self.clock = StepClock(model_size(self.model), gather, self._log_step, workers)  # type: ignore[arg-type]
        self.noise_stage = NoiseStage(noise, self._measure_weights, self._take_noise_kl)
        self.validation, self.conversations = validation, conversations
        self.template = (
            conversations.template if conversations else ChatTemplate(processing_class, training.chat_template_kwargs)  # type: ignore[arg-type]
        )
        self.step = make_step(self, peft_config, generation_kwargs, grade_early)
        self.pending: list[MicroBatch] | None = None
        """The micro-batches of the generation batch that is trained on."""
        self.args.eval_on_start = validation is not None  # `_evaluate` before the first step, of a resumed run too
        ends = EndOfStream(self) if config.algorithm.dynamic_sampling else None
        self.last_step = LastStep(self)
        # In this order at each event: the noise's stage is read by none of the others; the clock stops before scores;
        # which step is the last is known to the validation.
        for callback in (self.noise_stage if self.noise else None, self.clock, ends, validation, self.last_step):
            if callback is not None:
                self.add_callback(callback)

    # What the loop asks for

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Of the data loader's rows nothing is used, as the stream has its own. Where nothing is to be computed there
        is no backward either: DeepSpeed would reduce gradients that nothing has made."""
        began = time.perf_counter()
        micro_batch = self._next()
        self._current_train_step_time += time.perf_counter() - began  # TRL's metric step_time
        if micro_batch.batch is not None:
            return super().training_step(model, micro_batch, num_items_in_batch)  # type: ignore[arg-type]
        self._step += 1
        return torch.zeros((), device=self.accelerator.device)

    def _next(self) -> MicroBatch:
        cycle, state = self.step.cycle, self.state
        if cycle.begins(self._step) or self.pending is None:
            self.model.train()
            epoch = len(self.callback_handler.train_dataloader)  # type: ignore[arg-type]
            left = cycle.batches_left(state.global_step, state.max_steps, self._made(), epoch)
            with self.clock("prepare"), self.saved_where_workers_are_lost():
                batch, self.pending = self.step.batch(state.global_step, left)
                self._log_batch(batch)
        micro_batch = self.pending[cycle.place(self._step)]
        self.clock.count_trained(micro_batch.trained_tokens)
        return micro_batch

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:  # type: ignore[override]
        return inputs

    def compute_loss(self, model: Any, inputs: MicroBatch, *_: Any, **__: Any) -> torch.Tensor:  # type: ignore[override]
        """TRL's would time it, and send W&B each micro-batch's seconds."""
        loss = self.step.loss(model, inputs, self.state.global_step, self.current_gradient_accumulation_steps)
        self.nonfinite.add(loss)
        if self.accelerator.sync_gradients:
            self.step.end_of_update()
        return loss

    @contextlib.contextmanager
    def saved_where_workers_are_lost(self) -> Iterator[None]:
        """A checkpoint of the last step is there when a PoolLost leaves this context. Every process comes here, as each
        has it."""
        try:
            yield
        except PoolLost as error:
            folder = f"checkpoint-{self.state.global_step}"
            if not self.state.global_step:
                raise
            if not (Path(self.args.output_dir or ".") / folder).is_dir():
                self.last_step.set_random_numbers()
                if self._made():
                    self.state.num_input_tokens_seen = self.last_step.tokens
                self._save_checkpoint(self.model, None)
            raise PoolLost(
                f"{error}; {folder} is saved, --config.training.resume_from_checkpoint auto goes on"
            ) from None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        self.last_step.keep_random_numbers()

    def process_state(self) -> ProcessState:
        """While a step is under way, what was before it: part of a gradient is in no checkpoint."""
        if not self._made():
            return super().process_state()
        assert self.last_step.state is not None
        return self.last_step.state

    def _made(self) -> int:
        """Micro-batches of the step that is under way; 0 between two steps."""
        return self._step - self.last_step.micro_batches

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """transformers comes here before the first step, and between a step's log and its checkpoint where
        `Validation` has asked for it. The training's metrics, random numbers and rollouts are left as they are."""
        assert self.validation is not None
        metrics: dict[str, float] = {}
        if self.validation.due(self.state.global_step, self.state.max_steps):
            where = self.accelerator.device
            devices = [] if where.type == "cpu" else [where]
            with self.clock("validation"), torch.random.fork_rng(devices, device_type=where.type):
                metrics = self.validation.run(self.state.global_step, self.step.engine, self._save_adapter)
            Trainer.log(self, dict(metrics))  # TRL's own would flush the metrics of the steps since its last
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def create_optimizer(self, *args: Any, **kwargs: Any):
        optimizer = super().create_optimizer(*args, **kwargs)
        return optimizer if self.step.critic is None else self.step.critic.own_group(optimizer)

    def _clip_grad_norm(self, model: Any):
        """The critic's gradient is clipped by itself, so that it never shortens the policy's. DeepSpeed clips all that
        it trains together."""
        if self.step.critic is None or self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)
        return self.step.critic.clip_apart(self.accelerator, model, self.args.max_grad_norm)

    # Noise

    def _measure_weights(self) -> None:
        """How large are the weights that get noise? Relative noise is scaled by it; one warning where the noise is
        large for them."""
        assert self.noise is not None
        with self.policy.whole([target.weight for target in self.noise.targets]):
            self.noise.measure()
        names = [target.name for target in self.noise.targets]
        if self.accelerator.is_main_process and (
            warning := size_warning(self.config.noise_injection, names, self.noise.rms)
        ):
            log.warning("%s", warning)

    def _take_noise_kl(self) -> float | None:
        return self.step.metrics.take_mean("aqn/kl")

    # Logging and checkpoints

    def _log_batch(self, batch: Batch) -> None:
        """The tokens of all processes' generation batches, prompts included (transformers' count, and TRL's metric),
        and what TRL shows of the completions, where it is asked to. Every process must come here."""
        tokens = sum(len(row.prompt_ids) + len(row.token_ids) for row in batch.rows)
        self.state.num_input_tokens_seen += int(self.step.processes.added_up([float(tokens)])[0])
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        if not self.log_completions:
            return
        shown = self.step.processes.gathered(completions_of(batch.rows, self.reward_func_names))
        for name in ("prompt", "completion"):  # the table has one type of all rows' arguments of calls
            told = [row[name] if self.conversations is None else as_json(row[name]) for row in shown]
            self._logs[name].extend(told)
        for name in self.reward_func_names:
            self._logs["rewards"][name].extend(row[name] for row in shown)
        known = {"prompt", "completion", *self.reward_func_names}
        for column in sorted({column for row in shown for column in row} - known):
            self._logs["extra"][column].extend(row.get(column) for row in shown)
        assert batch.advantages is not None
        advantages = masked_mean(batch.advantages.expand(batch.mask.shape), batch.mask)[:, 0]
        self._logs["advantages"].extend(self.step.processes.rows(advantages).tolist())

    def _save_batch(self, folder: Path) -> None:
        """The rows that the update is of: what is shown of each completion, and the columns of each micro-batch."""
        batches = [micro.batch for micro in self.pending or [] if micro.batch and not micro.padding]
        rows = completions_of([row for batch in batches for row in batch.rows], self.reward_func_names)
        tensors = {f"{i}.{name}": column for i, batch in enumerate(batches) for name, column in batch.columns().items()}
        save_batch(folder, self.args.process_index, rows, tensors)

    def _save_adapter(self, folder: Path) -> None:
        """The adapter, or the model, and the tokenizer. Every process must come here."""
        self.save_model(str(folder), _internal_call=True)  # pushed to no hub

    def _log_step(self, metrics: dict[str, float]) -> None:
        add_step(self._metrics["train"], metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.noise and "loss" in logs:
            stage = self.noise_stage.stage
            logs |= {"aqn/sigma": stage.sigma, "aqn/stage": stage.index, "aqn/num_modules": len(self.noise.targets)}
            logs |= size_metrics(self.noise.sigmas(stage.sigma), self.noise.rms)
            logs |= {} if stage.target_kl is None else {"aqn/target_kl": stage.target_kl}
        self.step.metrics.flush(self.step.comparison.tolerance)
        super().log(logs, start_time)

    def _run_state(self) -> dict[str, Any]:
        step = self.step
        state = super()._run_state() | {"measured": step.metrics.state(), "weights": asdict(step.weights)}
        state["merging"] = step.engine.merging
        if step.entropy_bonus:
            state["entropy"] = step.entropy_bonus.state()
        if self.noise:
            state["rms"] = self.noise.rms
        return state

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        super()._restore_run_state(state)
        step = self.step
        if self.noise and "rms" in state:  # of the weights as the run began; norms may be trained
            self.noise.rms[:] = state["rms"]
        if "sums" in state.get("measured", {}):
            step.metrics.restore(state["measured"])
            step.weights = Weights(**state["weights"])
        step.engine.merging = state.get("merging", False)
        if step.entropy_bonus and "entropy" in state:
            step.entropy_bonus.coefficient, step.entropy_bonus.last = state["entropy"]

    def _rollout_state(self) -> RolloutState:
        pending = (
            None if self.step.cycle.begins(self._step) else [micro_batch.state() for micro_batch in self.pending or []]
        )
        return RolloutState(
            step=self._step,
            buffered_inputs=pending,
            settings=self._window_settings(),
            adapted=asdict(self.noise_stage.adapted) if self.config.noise_injection.schedule == "target_kl" else None,
            kl_coefficient=self.step.kl_coefficient.value,
            stream=self.step.collector.stream.state(),
            ahead=self.step.collector.state_ahead(),
        )

    def _restore_rollout(self, state: RolloutState) -> None:
        self._step = self.last_step.micro_batches = state.step
        if state.buffered_inputs is not None:
            self.pending = [MicroBatch.restored(each) for each in state.buffered_inputs]
        coefficient = self.step.kl_coefficient
        if state.kl_coefficient is not None and coefficient.target is not None:
            coefficient.value = state.kl_coefficient
        if state.adapted is not None:
            self.noise_stage.adapted = Adapted(**state.adapted)
        self.step.collector.stream.restore(state.stream)
        self.step.collector.go_on_with(state.ahead)

    def _save_own(self, checkpoint: Path) -> None:
        super()._save_own(checkpoint)
        self.save_critic(checkpoint)

    def save_critic(self, folder: Path) -> None:
        """Every process must come here."""
        if self.step.critic is not None:
            self.step.critic.save(folder, self.policy.whole, write=self.accelerator.is_main_process)

    def _window_settings(self) -> dict[str, int]:
        fields = "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"
        return {field: getattr(self.args, field) for field in fields}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.step.critic is not None and not self.is_deepspeed_enabled:
            self.step.critic.load(Path(checkpoint))  # DeepSpeed's own checkpoint holds all that is trained
        super()._load_optimizer_and_scheduler(checkpoint)


class LastStep(TrainerCallback):
    """How the run was after its last step, for the checkpoint that is saved where workers are lost in the next.

    Attributes:
        micro_batches: that were trained by then.
        random_numbers: the states of torch's generator and of the accelerator's, from which a checkpoint goes on: in a
            new epoch the data loader draws before the next step begins, and does so again in a resumed run.
        state: what the process held; None where workers draw nothing amid the next step.
        tokens: TrainerState.num_input_tokens_seen.
    """

    def __init__(self, trainer: PerlGRPOTrainer) -> None:
        self.trainer, self.micro_batches, self.state, self.tokens = trainer, 0, None, 0
        self.keep_random_numbers()

    def _device(self) -> list[torch.device]:
        device = self.trainer.accelerator.device
        return [] if device.type == "cpu" else [device]

    def keep_random_numbers(self) -> None:
        of_device = [torch.get_device_module(each).get_rng_state(each) for each in self._device()]
        self.random_numbers = [torch.get_rng_state(), *of_device]

    def set_random_numbers(self) -> None:
        torch.set_rng_state(self.random_numbers[0])
        for each, state in zip(self._device(), self.random_numbers[1:], strict=True):
            torch.get_device_module(each).set_rng_state(state, each)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of a resumed run too, whose first step ends no other."""
        self.state, step = None, self.trainer.step
        if step.engine.remote and state.global_step and step.cycle.begins_amid_update(self.micro_batches):
            now = self.trainer.process_state()
            self.state, self.tokens = replace(now, run=copy.deepcopy(now.run)), state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.micro_batches = self.trainer._step
        self.keep_random_numbers()


class EndOfStream(TrainerCallback):
    """With dynamic sampling how many steps the epochs' prompts last is not known before: the training ends where the
    next generation batch finds too few of them."""

    def __init__(self, trainer: PerlGRPOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run may have used up its epochs: it trains no further, as one that has made all its steps."""
        if state.global_step:
            self._ends(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = self.trainer.step.collector.stream.epoch
        if self._ends(args, state):
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy == "steps"

    def _ends(self, args: Any, state: Any) -> bool:
        """Whether the stream ends the training here, before its steps are made: then this step is the last, for all
        that asks."""
        step, collector = self.trainer.step, self.trainer.step.collector
        enough = collector.stream.left >= collector.batch
        if enough or not step.cycle.begins(self.trainer._step) or state.global_step >= state.max_steps:
            return False
        if state.is_world_process_zero:
            log.info(
                "dynamic sampling: the prompts of %g epochs are used up after step %d of at most %d: the training ends",
                args.num_train_epochs, state.global_step, state.max_steps,
            )  # fmt: skip
        state.max_steps = state.global_step
        return True


def as_json(messages: Any) -> str:
    """Text that any file takes: half a surrogate pair, which a model may write in an argument, is escaped."""
    text = json.dumps(messages, ensure_ascii=False, default=str)
    return text.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def changed(config: TrainingConfig, **values: Any) -> Iterator[None]:
    """Inside, fields of our arguments have these values."""
    before = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(before)


def copy_adapter(model: PeftModel, name: str) -> None:
    """A frozen copy of the adapter "default", as TRL makes its reference."""
    model.add_adapter(name, model.peft_config["default"])
    with torch.no_grad():
        for full_name, parameter in model.named_parameters():
            if ".default." in full_name:
                model.get_parameter(full_name.replace(".default.", f".{name}.")).copy_(parameter)
