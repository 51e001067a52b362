"""The main path of training: configuration -> prompts -> GRPO with AQN -> adapter."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list
from transformers import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from perl import device
from perl.adapters import ADAPTERS
from perl.config.load import Config, Parsed, parse
from perl.errors import UserError, lookup
from perl.grading import Grader
from perl.rewards import RewardContext, build_rewards
from perl.training import rundir, tracking
from perl.training.callbacks import MetricsWriter, ProgressLine
from perl.training.microbatches import LOSS_TYPES
from perl.training.out_of_memory import explain_out_of_memory
from perl.training.setup import build_dataset, load_model, load_tokenizer

if TYPE_CHECKING:
    from perl.training.trainer import PerlGRPOTrainer

log = logging.getLogger(__name__)


def train(argv: Sequence[str]) -> Path:
    """Train as the command line `argv` says and return the run's folder; adapter/ in it is the result.

    Raises UserError, before a model is loaded, for whatever the user can mend.
    """
    parsed = parse(argv)
    check_processes()
    config = parsed.build()
    check_engine(config)
    lookup(dict.fromkeys(LOSS_TYPES), config.training.loss_type, "loss", "--config.training.loss_type")
    set_up_logging(config)
    for warning in parsed.warnings:
        log.warning(warning)

    tokenizer = load_tokenizer(config.model.model_name_or_path)
    adapter = lookup(ADAPTERS, config.peft.type, "adapter type", "--config.peft.type")
    trainer_class = import_trainer(config)
    with explain_out_of_memory(config) as watch, Grader(deadline_s=config.reward.deadline_s) as grader:
        rewards = build_rewards(config.reward.functions, reward_context(config, grader))
        dataset = build_dataset(config.dataset, tokenizer)
        require_full_batch(config, len(dataset))
        run_dir = open_run(config, parsed)
        checkpoint = find_checkpoint(config, run_dir)

        with users_error("--config"):  # TRL checks combinations of its own arguments
            trainer = trainer_class(
                model=load_model(config),
                args=config.training,
                train_dataset=dataset,
                processing_class=tokenizer,
                reward_funcs=rewards,
                adapter=adapter,
                adapter_config=config.peft,
                noise=config.noise_injection,
                rollout=config.rollout,
                truncate_prompts_to=config.dataset.max_prompt_length,
                callbacks=[MetricsWriter(run_dir / "metrics.jsonl"), ProgressLine()],
            )
        watch.clock = trainer.clock
        trainer.remove_callback(PrinterCallback)  # prints what metrics.jsonl holds
        trainer.train(resume_from_checkpoint=checkpoint)
        save_adapter(trainer, run_dir / "adapter")
    return run_dir


def import_trainer(config: Config) -> type[PerlGRPOTrainer]:
    """The trainer class. TRL imports vLLM wherever it is installed, which takes ten seconds in every process; it is
    shown vLLM only when the rollouts use it."""
    if not config.training.use_vllm:
        setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda min_version=None: False)  # noqa: B010
    from perl.training.trainer import PerlGRPOTrainer

    return PerlGRPOTrainer


def check_processes() -> None:
    """As many processes as devices at most, one device for each."""
    devices, local = device.detect(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    variable = device.VISIBILITY_VARIABLE[devices.kind]
    if variable is None:
        return
    if local > devices.count:
        raise UserError(
            f"{local} processes but only {devices.count} {devices.kind} device(s) are visible;"
            f" start accelerate with --num_processes {devices.count}, or look at {variable}"
        )
    if "LOCAL_RANK" not in os.environ and devices.count > 1:
        raise UserError(
            f"one process sees {devices.count} {devices.kind} devices; set {variable}=0, or start with"
            f" accelerate launch --num_processes {devices.count} -m perl.train"
        )


def check_engine(config: Config) -> None:
    """Where TRL can't give vLLM new weights, it says so with a traceback, at the first rollout on a CPU."""
    kind, mode = device.detect().kind, config.training.vllm_mode
    if config.training.use_vllm and mode not in device.VLLM_MODES[kind]:
        raise UserError(
            f"--config.rollout.engine vllm: TRL can't give vLLM new weights in --config.training.vllm_mode {mode} on a"
            f" {kind} device; use --config.rollout.engine fast"
        )


def set_up_logging(config: Config) -> None:
    """Log lines on stdout from the main process, warnings of the others; the world size checked and shown."""
    main = config.training.process_index == 0
    level = logging.DEBUG if config.common.debug else logging.INFO
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("perl").setLevel(level if main else logging.ERROR)
    world_size = config.training.world_size
    asked = int(os.environ.get("PERL_NUM_PROCESSES", world_size))  # set by the launch script
    if asked != world_size:
        raise UserError(
            f"{asked} processes were asked for but {world_size} train together; accelerate's MULTI_CPU starts one"
            " process where there is no mpirun: use scripts/accelerate/cpu.yaml"
        )
    if main:
        print(f"num_processes: {world_size}", flush=True)


def reward_context(config: Config, grader: Grader) -> RewardContext:
    return RewardContext(
        grader=grader,
        max_completion_length=config.training.max_completion_length or 0,
        overlong_cache_length=int(config.reward.overlong_cache_length),
    )


def require_full_batch(config: Config, prompts: int) -> None:
    """A generation batch takes so many different prompts; with fewer, transformers would train no step at all."""
    assert config.training.generation_batch_size
    assert config.training.num_generations
    needed = config.training.generation_batch_size // config.training.num_generations
    if prompts < needed:
        raise UserError(
            f"--config.dataset: {prompts} prompts, but a generation batch takes {needed} (generation_batch_size"
            f" {config.training.generation_batch_size} / num_generations {config.training.num_generations}); give more"
            " rows, or lower per_device_train_batch_size or gradient_accumulation_steps"
        )


def open_run(config: Config, parsed: Parsed) -> Path:
    """The run's folder, the same on every process, with its config.yaml and environment.json."""
    kind = device.detect().kind
    default = rundir.default_run_dir(config.model.model_name_or_path, kind)
    name = [parsed.values.training.output_dir or str(default)]
    broadcast_object_list(name)  # every process has its own clock
    run_dir = Path(name[0])
    config.training.output_dir = str(run_dir)
    if config.training.process_index == 0:
        resuming = config.training.resume_from_checkpoint is not None
        rundir.prepare(run_dir, parsed, config.training.world_size, resuming)
        log.info("run folder: %s", run_dir.resolve())
    tracking.configure(config, run_dir, kind)
    if config.training.hub_token:
        # transformers pickles its arguments into every checkpoint; the hub reads the token from the environment too.
        os.environ.setdefault("HF_TOKEN", config.training.hub_token)
        config.training.hub_token = None
    return run_dir


def find_checkpoint(config: Config, run_dir: Path) -> str | None:
    """The checkpoint to go on from: `true` is the last one in the run's folder, else a path."""
    wanted = config.training.resume_from_checkpoint
    if wanted is None or str(wanted).lower() in ("false", "none", "null", ""):
        return None
    flag = "--config.training.resume_from_checkpoint"
    if str(wanted).lower() == "true":
        last = last_whole_checkpoint(run_dir)
        if last is None:
            raise UserError(
                f"{flag} true: no checkpoint in {run_dir}; name the run's folder with --config.training.output_dir,"
                " or a checkpoint's path"
            )
        return str(last)
    if not (Path(wanted) / "trainer_state.json").is_file():
        raise UserError(f"{flag}: {wanted} is no checkpoint (it has no trainer_state.json)")
    return str(wanted)


def last_whole_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of the highest step that was written to its end; one that a crash left half-written is passed
    over with a line. The rollout state is what the trainer writes last."""
    folders = [f for f in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if f.name.rpartition("-")[2].isdigit()]
    for folder in sorted(folders, key=lambda f: int(f.name.rpartition("-")[2]), reverse=True):
        if (folder / "trainer_state.json").is_file() and (folder / "rollout_state_0.pt").is_file():
            return folder
        log.warning("%s is incomplete: not resumed from", folder)
    return None


@contextlib.contextmanager
def users_error(where: str) -> Iterator[None]:
    """A complaint of the libraries below about their arguments reaches the user as one line."""
    try:
        yield
    except (ValueError, NotImplementedError, ImportError) as error:
        log.debug("what the library raised", exc_info=error)  # --config.common.debug true shows it
        raise UserError(f"{where}: {error}") from error


def save_adapter(trainer: PerlGRPOTrainer, folder: Path) -> None:
    """The adapter and the tokenizer, without transformers' pickled arguments."""
    trainer.save_model(str(folder))
    if trainer.args.process_index == 0:
        (folder / "training_args.bin").unlink(missing_ok=True)
        log.info("adapter: %s", folder.resolve())
