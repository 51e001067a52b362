"""What every trainer of an adapter, or of all weights, adds to TRL's: the method's own start, optimizer and schedule,
what it has been applied to, a stop where numbers are not finite, whole models as other programs read them, our model
card, and checkpoints that are written whole and resumed exactly."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from trl.distributed import DistributedBackend

from perl.adapters import ADAPTERS, Adapter
from perl.adapters.adalora import RankSchedule
from perl.adapters.applied import Applied, applied
from perl.adapters.none import autocast_dtype, complete_model, has_adapter
from perl.base.files import SAVING
from perl.config.schema import PeftConfig
from perl.runs import process_state
from perl.runs.checkpoints import CARD, TRAINER_STATE, kept_of, made_by, put_in_place, rotate
from perl.runs.nonfinite import NonFinite, require_finite_weights
from perl.runs.process_state import ProcessState, RolloutState

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

WriteCard = Callable[[Path, list[dict[str, Any]]], None]
"""Writes the model card into a folder that holds what was trained, given the log history."""


class AdapterTrainer:
    """Mixed into one of TRL's trainers.

    Attributes:
        adapter: the PEFT method; its optimizer replaces the default one when it has its own.
        config: the run's.
        adapter_config: its group `peft`.
        write_card: None: PEFT's card.
        nonfinite: what is done where loss or gradient are not finite.
        applied: what is trained.
        ranks: AdaLoRA's schedule; None for other methods.
    """

    adapter: Adapter
    config: Any
    adapter_config: PeftConfig
    write_card: WriteCard | None
    nonfinite: NonFinite
    applied: Applied
    ranks: RankSchedule | None
    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    state: Any
    control: Any
    _metrics: dict[str, dict[str, list[float]]]
    _tr_loss: torch.Tensor
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _total_train_tokens: int
    _push_from_checkpoint: Callable[[str], None]
    save_model: Callable[..., None]
    add_callback: Callable[[TrainerCallback], None]
    get_optimizer_cls_and_kwargs: Callable[..., tuple[type, dict[str, Any]]]

    def start_adapter(
        self, config: PeftConfig, write_card: WriteCard | None, on_nonfinite: Literal["stop", "skip"]
    ) -> None:
        """Once PEFT has wrapped the model: the method's own start, what is trained, and its schedule."""
        self.adapter = adapter = ADAPTERS[config.type]
        self.adapter_config, self.write_card = config, write_card
        self.nonfinite = NonFinite(on_nonfinite, Path(self.args.output_dir or "."), self.accelerator)
        policy = self.accelerator.unwrap_model(self.model)
        hook_inputs_once(policy.get_base_model() if has_adapter(policy) else policy)
        require_finite_weights(policy, f"--config.model.model_name_or_path {policy.config.name_or_path}")
        if adapter.start is not None:
            adapter.start(policy, config, DistributedBackend(self.accelerator).gather_params)
        self.applied, self.ranks = applied(policy, adapter, config), None
        if adapter.schedule is not None:
            self.ranks = adapter.schedule(policy, config)
            self.add_callback(AllocateRanks(self, self.ranks))

    def create_optimizer(self, *args: Any, **kwargs: Any):
        if self.optimizer is None and self.adapter.optimizer is not None:
            optimizer_class, optimizer_kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = self.adapter.optimizer(self.model, self.adapter_config, optimizer_class, optimizer_kwargs)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """transformers comes here once an update, before the optimizer's step (with DeepSpeed after it, which has made
        none where the norm is not finite). The trainer's loss gives each one to `nonfinite.add`."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        scaled = self.accelerator.mixed_precision == "fp16"
        if what := self.nonfinite.found(None if scaled else norm):
            self.nonfinite.settle(self.state.global_step + 1, what, self._save_batch)
            model.zero_grad()
        return norm

    def _save_batch(self, folder: Path) -> None:
        """This process's part of the batch under way."""
        raise NotImplementedError

    # Resume

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """transformers comes here once, before the first step."""
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        self._take_up(Path(checkpoint))
        if self.ranks is not None:
            self.ranks.load(Path(checkpoint))

    def _take_up(self, checkpoint: Path) -> None:
        """What this process held when `checkpoint` was written."""
        place = self.args.process_index, self.args.world_size
        saved = process_state.load(checkpoint, *place, self._window_settings(), self.args.device)
        if saved.rollout is not None:
            self._restore_rollout(saved.rollout)
        run = saved.run  # and not the policies that batches drawn ahead have: the callback stays to the run's end
        self.add_callback(GoOn(lambda: self._restore_run_state(run)))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers looks after a step whether it was the last one: a resumed run that has made all its steps would
        make one more. And its samplers begin with the first epoch's order, whichever epoch the run goes on in."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if kwargs["resume_from_checkpoint"] is not None and kwargs["epoch"] == kwargs["epochs_trained"]:
            begin_with_epoch(kwargs["train_dataloader"], kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def process_state(self) -> ProcessState:
        return ProcessState(run=self._run_state(), rollout=self._rollout_state())

    def _run_state(self) -> dict[str, Any]:
        """What this process has measured for the next log, and counted over the run, that is in no file of
        transformers and TRL: tensors and plain values."""
        return {
            "metrics": {n: [float(value) for value in values] for n, values in self._metrics["train"].items()},
            "loss": self._tr_loss,
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
            "tokens": self._total_train_tokens,
            **self.nonfinite.state(),
        }

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        """Put back what `_run_state` was; of another number of processes only what all have counted."""
        self._total_loss_scalar, self._total_train_tokens = state["total_loss"], state["tokens"]
        self.nonfinite.restore(state)
        if "loss" in state:
            self._tr_loss, self._globalstep_last_logged = state["loss"], state["last_logged"]
            self._metrics["train"].update(state["metrics"])

    def _rollout_state(self) -> RolloutState | None:
        """What is kept of the rollouts; None where there are none."""
        return None

    def _restore_rollout(self, state: RolloutState) -> None:
        """Put back what `_rollout_state` was."""

    def _window_settings(self) -> dict[str, int]:
        """How a generation window is cut into updates."""
        return {}

    # Logged and saved

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.ranks.metrics() if self.ranks is not None else {}
            logs |= {"nonfinite/skipped": float(self.nonfinite.skipped)} if self.nonfinite.policy == "skip" else {}
        super().log(logs, start_time)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Aside, and put in its place when every process has written all of its files: what is named checkpoint-N is
        whole."""
        run_dir, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        with written_into(self.args, run_dir / SAVING):
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            self._save_own(run_dir / SAVING / name)
        if self.args.should_save:
            (run_dir / SAVING / CARD).unlink(missing_ok=True)  # TRL's
        if self.state.best_global_step:
            self._name_best(run_dir, run_dir / SAVING / name)
        contents = {"made": made_by(self.args), "kept": kept_of(self.config)}
        self.put_in_place(run_dir / SAVING / name, run_dir / name, contents)
        if self.args.push_to_hub:
            if self.args.should_save and self.write_card is not None:
                shutil.copyfile(run_dir / name / CARD, run_dir / CARD)
            self._push_from_checkpoint(str(run_dir / name))
        if self.args.should_save:
            rotate(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _save_own(self, checkpoint: Path) -> None:
        """What is perl's in a checkpoint. Every process must come here."""
        process_state.save(checkpoint, self.args.process_index, self.args.world_size, self.process_state())
        if self.ranks is not None and self.args.process_index == 0:
            self.ranks.save(checkpoint)

    def _name_best(self, run_dir: Path, made: Path) -> None:
        """transformers looks for the best checkpoint among those that are being written."""
        best = run_dir / f"checkpoint-{self.state.best_global_step}"
        if best.name == made.name or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(made / TRAINER_STATE))

    def put_in_place(self, made: Path, folder: Path, contents: Mapping[str, Any] | None = None) -> None:
        """perl.runs.checkpoints.put_in_place, when every process has written its files into `made`; on each node that
        has a disk of its own. Every process must come here."""
        main, names = self.args.process_index == 0, [uuid.uuid4().hex]
        if self.args.world_size > 1:
            broadcast_object_list(names)
        token = made / f"_{names[0]}"  # a name that no node's cache of a shared disk knows of, as it may of `made`
        if main and made.is_dir():
            token.touch()
        self.accelerator.wait_for_everyone()
        moves = main or (self.args.local_process_index == 0 and not token.exists())
        self.accelerator.wait_for_everyone()
        if moves:
            token.unlink(missing_ok=True)
            put_in_place(made, folder, contents)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        folder = Path(output_dir or self.args.output_dir or ".")
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle of every argument, which nothing reads
        model = self.accelerator.unwrap_model(self.model)
        if not has_adapter(model):
            complete_model(folder, model.config.name_or_path, self.compute_dtype())
        # A run that goes on takes TRL's reference from peft.adapter again. From a checkpoint that holds it transformers
        # would load the reference alone, and not the adapter.
        shutil.rmtree(folder / "ref", ignore_errors=True)
        if self.write_card is not None:
            self.write_card(folder, self.state.log_history)  # over PEFT's

    def compute_dtype(self) -> torch.dtype:
        """What the model computes in: mixed precision's dtype, or that of its weights."""
        mixed, model = autocast_dtype(self.args), self.accelerator.unwrap_model(self.model)
        return mixed if mixed.itemsize < 4 else model.dtype


class AllocateRanks(TrainerCallback):
    """Calls AdaLoRA's schedule after each optimizer step, while its gradients are there.

    DeepSpeed makes its step within the backward pass and drops the gradients there: they are copied just before, by an
    engine whose `step` is replaced, as no callback or hook runs between the two. What is masked is written to its
    float32 weights too, which it would otherwise bring back in the next step.
    """

    def __init__(self, trainer: Any, ranks: RankSchedule):
        self.trainer, self.ranks = trainer, ranks
        self._gradients: dict[str, Any] | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.ranks.begin(state.max_steps)
        if args.deepspeed_plugin is not None:
            engine = self.trainer.model_wrapped
            engine_step = engine.step

            def step(*args: Any, **kwargs: Any) -> Any:
                from deepspeed.utils import safe_get_full_grad

                self._gradients = {name: safe_get_full_grad(p) for name, p in self.ranks.parameters().items()}
                return engine_step(*args, **kwargs)

            engine.step = step

    def on_optimizer_step(self, args, state, control, **kwargs):
        by_name = self._gradients or {name: p.grad for name, p in self.ranks.parameters().items()}
        gradients = [gradient for gradient in by_name.values() if gradient is not None]
        if not gradients or not all(gradient.isfinite().all() for gradient in gradients):
            return  # no update was made of it (common.on_nonfinite)
        self.ranks.after_step(state.global_step + 1, self._gradients)
        if self._gradients is not None:
            from deepspeed.utils import safe_set_full_fp32_param

            for parameter in self.ranks.masked():
                safe_set_full_fp32_param(parameter, parameter.detach().float())


class GoOn(TrainerCallback):
    """A resumed run takes up what it had counted (transformers sets it to 0 just before this event), and logs and saves
    as often as it is told now (transformers: as the checkpoint was)."""

    def __init__(self, restore: Callable[[], Any]):
        self.restore = restore

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restore()
        state.compute_steps(args, state.max_steps)


def hook_inputs_once(model: Any) -> None:
    """Have `model`, one of transformers, keep one hook on its embeddings that makes their output require a gradient.

    transformers adds one each time gradient checkpointing is enabled. Where it is disabled, which TRL does for each
    rollout, the hook is removed only from a model that has loaded an adapter itself: a rollout in a PEFT model left one
    more, and each forward called them all. The method of this one model is replaced, as transformers enables the
    hooks from inside, once a rollout, and calls nothing of a trainer's there."""
    if not hasattr(model, "disable_input_require_grads"):
        return

    def enable(self: Any) -> None:
        if hasattr(self, "_require_grads_hook"):
            self.disable_input_require_grads()
        type(self).enable_input_require_grads(self)

    model.enable_input_require_grads = MethodType(enable, model)


def begin_with_epoch(loader: Any, epoch: int) -> None:
    """Put the sampler of a data loader, which no epoch was drawn from yet, where it stands at the start of `epoch`."""
    sampler: Any = loader
    while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        sampler = inner
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    elif getattr(sampler, "shuffle", False):  # TRL's RepeatSampler has a generator of its own
        for _ in range(epoch):
            next(iter(sampler), None)  # draws the order of an epoch


@contextlib.contextmanager
def written_into(args: TrainingArguments, folder: Path) -> Iterator[None]:
    """transformers and TRL write a checkpoint into `folder` inside, and push it nowhere."""
    folder.mkdir(parents=True, exist_ok=True)
    before = args.output_dir, args.push_to_hub, args.save_total_limit
    args.output_dir, args.push_to_hub, args.save_total_limit = str(folder), False, None
    try:
        yield
    finally:
        args.output_dir, args.push_to_hub, args.save_total_limit = before
