"""Around every trainer, from top to bottom: logging, the run's folder, the training, its result."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Protocol

from accelerate.utils import broadcast_object_list, gather_object
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import PrinterCallback, TrainerCallback

from perl import device
from perl.adapters.none import store_as
from perl.base.errors import UserError
from perl.base.files import SAVING
from perl.base.redact import hide_secrets_in_logs
from perl.runs import rundir, tracking
from perl.runs.callbacks import MetricsWriter, ProgressLine, StopOnSignal
from perl.runs.checkpoints import goes_on, leave_behind
from perl.runs.process_state import NOT_DATA
from perl.runs.push import make_repository, upload
from perl.scoring.results import METRICS
from perl.tasks.trained import write_trained

if TYPE_CHECKING:
    from perl.config.load import Config, Parsed
    from perl.config.sft import SFTRunConfig
    from perl.runs.adapter_trainer import AdapterTrainer

log = logging.getLogger(__name__)


class Checked(Protocol):
    """What the checks before a training have found."""

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint that the run goes on from."""
        ...

    @property
    def problems(self) -> Sequence[str]:
        """asked_hash of each row."""
        ...


@contextlib.contextmanager
def begin(config: Config | SFTRunConfig, parsed: Parsed) -> Iterator[Path]:
    """Set up logging, log the command line's warnings, and keep other trainings out of the run's folder inside, which
    is the same on every process. A UserError of all of them where another training works in it."""
    set_up_logging(config)
    for warning in parsed.warnings:
        log.warning(warning)
    run_dir = agree_on_folder(config, parsed)
    rundir.check_place(run_dir)  # of each process: a node may have a disk of its own
    with contextlib.ExitStack() as run:
        refused: list[str | None] = [None]
        if config.training.process_index == 0:
            try:
                run.enter_context(rundir.held(run_dir, goes_on(config.training.resume_from_checkpoint)))
            except UserError as error:
                refused = [str(error)]
        broadcast_object_list(refused)
        if refused[0] is not None:
            raise UserError(refused[0])
        yield run_dir


def set_up_logging(config: Config | SFTRunConfig) -> None:
    """Log lines on stdout from the main process, warnings of the others; the world size checked and shown."""
    main = config.training.process_index == 0
    level = logging.DEBUG if config.common.debug else logging.INFO
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    hide_secrets_in_logs()
    logging.getLogger("perl").setLevel(level if main else logging.ERROR)
    world_size = config.training.world_size
    asked = str(world_size)
    if world_size == 1 and os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_ADDR" in os.environ:
        asked = "several"  # accelerate says for several processes alone where they meet
    asked = os.environ.get("PERL_NUM_PROCESSES", asked)  # set by the launch script
    if asked != str(world_size):
        raise UserError(
            f"{asked} processes were asked for but {world_size} train together; accelerate's MULTI_CPU starts one"
            " process where there is no mpirun: use scripts/accelerate/cpu.yaml"
        )
    if main:
        print(f"num_processes: {world_size}", flush=True)


def hide_vllm() -> None:
    """From TRL, before it imports a trainer: it imports vLLM wherever that is installed, which takes ten seconds in
    every process, and has no setting that keeps it from it."""
    setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda min_version=None: False)  # noqa: B010


def agree_on_folder(config: Config | SFTRunConfig, parsed: Parsed) -> Path:
    """The run's folder, the same on every process."""
    default = rundir.default_run_dir(config, device.detect().kind)
    name = [parsed.values.training.output_dir or str(default)]
    broadcast_object_list(name)  # every process has its own clock
    config.training.output_dir = name[0]
    return Path(name[0])


def describe_run(run_dir: Path, config: Config | SFTRunConfig, parsed: Parsed, checked: Checked) -> None:
    """Leave config.yaml, environment.json and trained_problems.json in the folder, and settle where metrics go."""
    agree_on_checkpoint(checked.checkpoint)
    if config.training.process_index == 0:
        if goes_on(config.training.resume_from_checkpoint):
            leave_behind(run_dir, checked.checkpoint)
        rundir.prepare(run_dir, parsed, config.training.world_size)
        data = config.dataset
        # What is trained has seen the problems of those runs too.
        before = checked.checkpoint or config.peft.adapter, config.model.model_name_or_path
        with rundir.writable(run_dir):
            write_trained(run_dir, data.dataset_name_or_path, data.split, checked.problems, *before)
        log.info("run folder: %s", run_dir.resolve())
        if config.training.push_to_hub:
            make_repository(config.training)
    tracking.configure(config, run_dir, device.detect().kind)
    if config.training.hub_token:
        # the hub reads it from the environment too; the arguments go to trackers and, pushed, to a pickle
        os.environ.setdefault("HF_TOKEN", config.training.hub_token)
        config.training.hub_token = None


def agree_on_checkpoint(checkpoint: str | None) -> None:
    """A UserError of every process where they would go on from different ones: each may see a disk of its own."""
    checkpoints = gather_object([checkpoint])
    if len(set(checkpoints)) > 1:
        listed = ", ".join(f"process {rank} {each or 'none'}" for rank, each in enumerate(checkpoints))
        raise UserError(
            f"--config.training.resume_from_checkpoint: the processes find different checkpoints ({listed}); name one"
            " that all of them see"
        )


def log_writers(run_dir: Path) -> list[TrainerCallback]:
    """What is logged goes to metrics.jsonl, the screen and the trackers."""
    return [MetricsWriter(run_dir / METRICS), ProgressLine(), tracking.WandbRunWriter(run_dir)]


@contextlib.contextmanager
def users_error(where: str) -> Iterator[None]:
    """A complaint of the libraries below about their arguments reaches the user as one line."""
    try:
        yield
    except (ValueError, NotImplementedError, ImportError, TemplateError) as error:
        log.debug("what the library raised", exc_info=error)  # --config.common.debug true shows it
        raise UserError(f"{where}: {error}") from error


def fit(trainer: Any, run_dir: Path, checkpoint: str | None, stop: StopOnSignal) -> None:
    """Train from the start, or on from `checkpoint`, and leave the result in the run's folder.

    Args:
        trainer: an AdapterTrainer that is one of transformers' trainers.

    Raises:
        Stopped: a signal ended the training, after a checkpoint.
    """
    if trainer.args.process_index == 0:
        rundir.write_applied(run_dir, trainer.applied)
    trainer.remove_callback(PrinterCallback)  # prints what metrics.jsonl holds
    tracking.outlive(trainer.callback_handler.callbacks)
    with plain_checkpoint(checkpoint), tied_weights_known(trainer):
        trainer.train(resume_from_checkpoint=checkpoint)
    stop.raise_if_stopped(trainer.args, trainer.state, run_dir)
    save_result(trainer, run_dir)


@contextlib.contextmanager
def tied_weights_known(trainer: AdapterTrainer) -> Iterator[None]:
    """A checkpoint of all weights holds tied ones under one name: transformers does not warn inside that the other is
    missing."""
    tied = getattr(trainer.accelerator.unwrap_model(trainer.model), "all_tied_weights_keys", {})

    def warns_of_others(record: logging.LogRecord) -> bool:
        missing = re.fullmatch(
            r"There were missing keys in the checkpoint model loaded: \[(.*)\]\.", record.getMessage()
        )
        return missing is None or not {name.strip("' ") for name in missing[1].split(",")} <= set(tied)

    logger = logging.getLogger("transformers.trainer")
    logger.addFilter(warns_of_others)
    try:
        yield
    finally:
        logger.removeFilter(warns_of_others)


@contextlib.contextmanager
def plain_checkpoint(checkpoint: str | None) -> Iterator[None]:
    """What torch.load, which reads tensors and plain values alone, refuses of a checkpoint's files is one line, and so
    is a file that is not what it was."""
    where = f"--config.training.resume_from_checkpoint {checkpoint}: a file in it"
    try:
        yield
    except UnpicklingError as error:
        log.debug("what torch.load refused", exc_info=error)
        raise UserError(f"{where} {NOT_DATA}") from error
    except (SafetensorError, RuntimeError) as error:
        if not any(reading in str(error) for reading in ("PytorchStreamReader", "deserializing")):
            raise
        raise UserError(f"{where} is not whole ({str(error).splitlines()[0]}); name an earlier checkpoint") from error


def save_result(trainer: AdapterTrainer, run_dir: Path) -> None:
    """The adapter, or the whole model in the dtype that it computes in, and the tokenizer: whole, or not there."""
    name, args = trainer.adapter.result, trainer.args
    made, folder = run_dir / SAVING / name, run_dir / name
    trainer.save_model(str(made), _internal_call=True)
    if args.process_index == 0 and name == "model":
        store_as(made, trainer.compute_dtype())
    trainer.put_in_place(made, folder)
    if args.process_index == 0:
        log.info("%s: %s", name, folder.resolve())


def push_result(trainer: AdapterTrainer, run_dir: Path) -> None:
    """Last, when all that a run leaves is there: the hub may take nothing."""
    if trainer.args.push_to_hub:
        trainer.save_model(_internal_call=True)  # beside what transformers has pushed while it trained
        if trainer.args.process_index == 0:
            upload(trainer, run_dir / trainer.adapter.result)
