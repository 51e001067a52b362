"""Where metrics are sent besides metrics.jsonl: W&B, trackio, tensorboard and whatever else transformers knows."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from perl.base.errors import lookup
from perl.base.redact import hide_secrets_in_output
from perl.base.tracking import WandbRun, hide_from_wandb, require_trackers, wandb_is_disabled, wandb_mode
from perl.config.load import Config
from perl.runs.rundir import method_of, model_slug, writable

if TYPE_CHECKING:
    from perl.config.sft import SFTRunConfig

log = logging.getLogger(__name__)

FLAG = "--config.training.report_to"


def check_trackers(training: TrainingArguments) -> None:
    """Raise a UserError for an unknown tracker, and for one whose package is not installed."""
    names = trackers(training)
    for name in names:
        lookup(INTEGRATION_TO_CALLBACK, name, "tracker", FLAG)
    require_trackers([name for name in names if name != "kubeflow"], FLAG)  # which has no package


def trackers(training: TrainingArguments) -> list[str]:
    """What `report_to` asks for (`all` is for transformers all that are installed), without W&B where WANDB_DISABLED
    is set."""
    dropped = {"none", "wandb"} if wandb_is_disabled() else {"none"}
    return [name for name in training.report_to or () if name not in dropped]


def configure(config: Config | SFTRunConfig, run_dir: Path, kind: str) -> None:
    """Settle `config.training.report_to` and what the trackers read from the environment.

    A run that goes on in its own folder goes on in its W&B run too.
    """
    training, wanted = config.training, trackers(config.training)
    if "wandb" in (training.report_to or ()) and wandb_is_disabled():
        log.info("WANDB_DISABLED is set: nothing is sent to W&B")
    project = f"{method_of(config)}_{model_slug(config.model.model_name_or_path)}-{kind}".replace("_", "-")
    if "wandb" in wanted:
        os.environ["WANDB_MODE"] = mode = wandb_mode()
        os.environ.setdefault("WANDB_DIR", str(run_dir))
        os.environ["WANDB_PROJECT"] = config.logging.wandb_project or os.environ.get("WANDB_PROJECT") or project
        if (before := WandbRun.read(run_dir)) is not None:
            os.environ.setdefault("WANDB_RUN_ID", before.id)
            os.environ.setdefault("WANDB_RESUME", "allow")
        # A warning, since the script shows these on the screen: who expects a page of W&B would wait for it in vain.
        log.log(
            logging.INFO if mode == "online" else logging.WARNING,
            "W&B is %s, project %s%s",
            mode,
            os.environ["WANDB_PROJECT"],
            f"; send it later with wandb sync {run_dir}/wandb/offline-run-*" if mode == "offline" else "",
        )
        hide_from_wandb()
    if "trackio" in wanted:
        if training.project == type(training).__dataclass_fields__["project"].default:
            training.project = project
        log.info("trackio: project %s; look at it with trackio show --project %s", training.project, training.project)
    if "tensorboard" in wanted:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run_dir / "tensorboard"))
    training.report_to = wanted
    training.run_name = training.run_name or run_dir.name


def outlive(callbacks: Iterable[TrainerCallback]) -> None:
    """From now on a tracker of transformers' that fails after the training has begun is left out, with one line: its
    process may have got the signal by which the training ends in good order, or its server may have gone."""
    names = {kind: name for name, kind in INTEGRATION_TO_CALLBACK.items()}
    for callback in callbacks:
        if (name := names.get(type(callback))) is not None:
            events = [event for event in dir(callback) if event.startswith("on_") and event != "on_train_begin"]
            own = {event: getattr(callback, event) for event in events}
            for event in events:
                setattr(callback, event, functools.partial(_unless_lost, name, own, event))


def _unless_lost(
    name: str, own: dict[str, Callable[..., Any]], event: str, args: Any, *others: Any, **more: Any
) -> Any:
    """
    Args:
        own: the tracker's methods by event, none once it is lost.
        args: the training's, the first of what an event is given.
    """
    if event not in own:
        return None
    try:
        return own[event](args, *others, **more)
    except Exception as error:  # noqa: BLE001  # whatever it is, the training does without the tracker
        own.clear()
        args.report_to = [each for each in args.report_to if each != name]  # by which TRL sends tables of completions
        log.warning("%s failed (%s: %s): the training goes on without it", name, type(error).__name__, error)
        if name == "wandb":  # else it complains once more at the end of the process
            with contextlib.suppress(Exception):
                sys.modules["wandb"].teardown(1)
        return None


class WandbRunWriter(TrainerCallback):
    """Writes down which W&B run the training logs to, so that the evaluation of its adapters finds it."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero or "wandb" not in (args.report_to or ()):
            return
        import wandb

        if wandb.run is not None:  # transformers' callback, which comes before this one, has started it
            hide_secrets_in_output()  # of which W&B keeps a copy
            run = WandbRun(id=wandb.run.id, project=wandb.run.project, entity=wandb.run.entity or None)
            with writable(self.run_dir):
                run.write(self.run_dir)
