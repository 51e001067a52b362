"""The main path of training: configuration -> prompts -> GRPO with AQN -> adapter, or model."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list, gather_object
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import PrinterCallback, TrainerCallback

from perl import device
from perl.adapters import ADAPTERS
from perl.adapters.none import store_as
from perl.config.load import Config, Parsed, parse
from perl.errors import UserError
from perl.grading import Grader
from perl.redact import hide_secrets_in_logs
from perl.results import METRICS
from perl.rewards import build_rewards, grade_early, reward_context
from perl.tasks.trained import write_trained
from perl.training import rundir, tracking
from perl.training.callbacks import MetricsWriter, ProgressLine, StopOnSignal
from perl.training.model_card import write_training_card
from perl.training.out_of_memory import explain_out_of_memory
from perl.training.preflight import Checked, check_processes, check_run
from perl.training.process_state import NOT_DATA
from perl.training.push import pushed
from perl.training.reward_deadline import RewardDeadline
from perl.training.run_checkpoints import CRITIC, SAVING, goes_on, leave_behind
from perl.training.setup import load_critic_base, load_model
from perl.training.validation import Validation
from perl.training.vision import language_part

if TYPE_CHECKING:
    from perl.config.sft import SFTRunConfig
    from perl.training.adapter_trainer import AdapterTrainer
    from perl.training.sft_rows import CheckedRows
    from perl.training.trainer import PerlGRPOTrainer

log = logging.getLogger(__name__)


def train(argv: Sequence[str]) -> Path:
    """Train as the command line `argv` says and return the run's folder; adapter/ in it, or model/, is the result.

    Raises:
        UserError: before a model is loaded, for whatever the user can fix.
        Stopped: a signal ended the run, after a checkpoint.
    """
    parsed = parse(argv)
    check_processes()
    config = parsed.build()
    set_up_logging(config)
    for warning in parsed.warnings:
        log.warning(warning)
    run_dir = agree_on_folder(config, parsed)
    checked = check_run(config, run_dir)

    trainer_class = import_trainer(config)
    with (
        StopOnSignal() as stop,
        explain_out_of_memory(config) as watch,
        Grader(deadline_s=config.reward.deadline_s) as grader,
        reward_deadline(config) as deadline,
    ):
        context = reward_context(config, grader)
        rewards = deadline.over(config.reward.functions, build_rewards(config.reward.functions, context))
        open_run(run_dir, config, parsed, checked)
        with users_error("--config"):  # TRL checks combinations of its own arguments
            trainer = trainer_class(
                model=load_model(config),
                args=config.training,
                train_dataset=checked.dataset,
                processing_class=checked.tokenizer,
                reward_funcs=rewards,
                adapter=ADAPTERS[config.peft.type],
                adapter_config=language_part(config.peft, checked.tokenizer),
                noise=config.noise_injection,
                algorithm=config.algorithm,
                critic=config.critic,
                critic_base=load_critic_base(config),
                rollout=config.rollout,
                truncate_prompts_to=config.dataset.max_prompt_length,
                truncation="left" if config.dataset.truncation == "error" else config.dataset.truncation,
                grade_early=grade_early(config.reward.functions, context),
                validation=open_validation(config, run_dir, checked, grader),
                write_card=functools.partial(write_training_card, run_dir),
                on_nonfinite=config.common.on_nonfinite,
                callbacks=[*log_writers(run_dir), stop],
            )
        watch.clock = trainer.clock
        fit(trainer, run_dir, checked.checkpoint, stop)
        save_critic(trainer, run_dir)
        push_result(trainer, run_dir)
    return run_dir


def log_writers(run_dir: Path) -> list[TrainerCallback]:
    """What is logged goes to metrics.jsonl, the screen and the trackers."""
    return [MetricsWriter(run_dir / METRICS), ProgressLine(), tracking.WandbRunWriter(run_dir)]


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
    with plain_checkpoint(checkpoint):
        trainer.train(resume_from_checkpoint=checkpoint)
    stop.raise_if_stopped(trainer.args, trainer.state, run_dir)
    save_result(trainer, run_dir)


def reward_deadline(config: Config) -> RewardDeadline:
    """Shorter than the time that other processes wait for the rewards."""
    seconds = config.reward.function_deadline_s or config.training.ddp_timeout / 2
    return RewardDeadline(
        seconds,
        "if it needs longer, raise --config.reward.function_deadline_s, and --config.training.ddp_timeout, which must"
        " be longer",
    )


def import_trainer(config: Config) -> type[PerlGRPOTrainer]:
    """The trainer class. TRL imports vLLM wherever it is installed, which takes ten seconds in every process; it is
    shown vLLM only when the rollouts use it."""
    if not config.training.use_vllm:
        hide_vllm()
    from perl.training.trainer import PerlGRPOTrainer

    return PerlGRPOTrainer


def hide_vllm() -> None:
    """From TRL, before it imports a trainer."""
    setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda min_version=None: False)  # noqa: B010


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


def agree_on_folder(config: Config | SFTRunConfig, parsed: Parsed) -> Path:
    """The run's folder, the same on every process."""
    default = rundir.default_run_dir(config, device.detect().kind)
    name = [parsed.values.training.output_dir or str(default)]
    broadcast_object_list(name)  # every process has its own clock
    config.training.output_dir = name[0]
    return Path(name[0])


def open_run(run_dir: Path, config: Config | SFTRunConfig, parsed: Parsed, checked: Checked | CheckedRows) -> None:
    """Make the folder with its config.yaml, environment.json and trained_problems.json, and settle where metrics go."""
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
    tracking.configure(config, run_dir, device.detect().kind)
    if config.training.hub_token:
        # the hub reads the token from the environment too, and the arguments go to trackers and, pushed, to a pickle.
        os.environ.setdefault("HF_TOKEN", config.training.hub_token)
        config.training.hub_token = None


def agree_on_checkpoint(checkpoint: str | None) -> None:
    """A UserError of every process where they would go on from different ones: each may see a disk of its own."""
    found = gather_object([checkpoint])
    if len(set(found)) > 1:
        said = ", ".join(f"process {rank} {each or 'none'}" for rank, each in enumerate(found))
        raise UserError(
            f"--config.training.resume_from_checkpoint: the processes find different checkpoints ({said}); name one"
            " that all of them see"
        )


def open_validation(config: Config, run_dir: Path, checked: Checked, grader: Grader) -> Validation | None:
    """What validates while the model trains; None where no dataset is named."""
    if checked.validation is None:
        return None
    engine, training = "vllm" if config.training.use_vllm else "hf", config.training
    return Validation(checked.validation, grader, run_dir, engine, training.process_index, training.world_size)


@contextlib.contextmanager
def users_error(where: str) -> Iterator[None]:
    """A complaint of the libraries below about their arguments reaches the user as one line."""
    try:
        yield
    except (ValueError, NotImplementedError, ImportError, TemplateError) as error:
        log.debug("what the library raised", exc_info=error)  # --config.common.debug true shows it
        raise UserError(f"{where}: {error}") from error


@contextlib.contextmanager
def plain_checkpoint(checkpoint: str | None) -> Iterator[None]:
    """What torch.load, which reads tensors and plain values alone, refuses of a checkpoint's files is one line, and so
    is a file that is cut off (in a checkpoint of an older version, which does not say how long it should be)."""
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


def save_critic(trainer: PerlGRPOTrainer, run_dir: Path) -> None:
    """The critic, whole, where there is one."""
    if trainer.critic is not None:
        trainer.save_critic(run_dir / SAVING)
        trainer.put_in_place(run_dir / SAVING / CRITIC.parent, run_dir / CRITIC.parent)


def push_result(trainer: AdapterTrainer, run_dir: Path) -> None:
    """Last, when all that a run leaves is there: the hub may take nothing."""
    args = trainer.args
    if args.push_to_hub:
        with pushed(run_dir / trainer.adapter.result, args.hub_model_id):
            trainer.push_to_hub(commit_message="Model save", revision=args.hub_revision)
