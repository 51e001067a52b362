"""Every check of a run that needs no loaded model, in one place.

perl.train makes them in each process; the launch script makes the same ones in one process (perl/tools/launch.py)
before it starts any, so that a mistake is one line and exit code 2 there too, and leaves no run folder.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from perl import device
from perl.adapters import ADAPTERS
from perl.adapters.checks import check_layers, check_method, strategy_of
from perl.adapters.none import NO_ADAPTER
from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError, lookup
from perl.config.derived import batches_ahead, too_many_workers
from perl.config.load import Config
from perl.engines.quantised_base import check_drawn
from perl.engines.sampling import validate
from perl.engines.torch_policy import require_possible
from perl.engines.vllm import cannot_serve, require_vllm
from perl.environments.conversation import Conversations, open_conversations
from perl.environments.tools import EnvironmentSource, load_environment
from perl.grading import Grader
from perl.models.folders import resolve_model
from perl.prompts import ChatTemplate
from perl.rewards.functions import build_rewards, check_tasks, grades_rows, reward_context
from perl.runs import checkpoints, rundir
from perl.runs.setup import (
    MODEL_FLAG,
    PROBLEM,
    build_dataset,
    check_checkpoints,
    check_length,
    check_quantization,
    limits_of,
    load_tokenizer,
    model_dtype,
)
from perl.runs.tracking import check_trackers
from perl.runs.vision import check_images, check_mixed_rows, language_part
from perl.training.batch import Cycle
from perl.training.collect import rollout_sampling
from perl.training.loss import SURROGATES
from perl.training.validation_setup import ValidationSetup, set_up_validation
from perl.workers.conversations import absolute, files_of
from perl.workers.executors import require_cluster, require_ray
from perl.workers.local import require_room

if TYPE_CHECKING:
    from perl.config.training import TrainingConfig

log = logging.getLogger(__name__)

CHOICES = {
    "loss_type": tuple(SURROGATES),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("colocate",),
}
"""Fields that GRPOConfig takes any text for, and TRL refuses at the first rollout or loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the checks have read, for the run to use."""

    tokenizer: PreTrainedTokenizerBase
    """Of a model that takes images: its processor."""
    dataset: Dataset
    problems: list[str]
    """Which problems its rows are."""
    checkpoint: str | None
    """To go on from."""
    conversations: Conversations | None
    """With the run's environments; None where there are none."""
    validation: ValidationSetup | None
    """What the run validates on; None where no dataset is named."""


def check_run(config: Config, run_dir: Path) -> Checked:
    """All other checks, the cheap ones first: fields, rewards, the run's folder, tokenizer, data.

    Raises UserError for the first mistake found. Nothing is written.
    """
    strategy = strategy_of(config.training)
    check_method(config.peft, config.training, strategy)
    check_training(config.training)
    check_sampling(config.training)
    check_trackers(config.training)
    check_engine(config, strategy)
    model_dtype(config)
    check_quantization(config, strategy)
    if not (config.rollout.workers and config.rollout.executor == "ray"):  # whose devices the cluster knows
        check_drawn(config, device.detect().kind, strategy)
    source = load_environment(config.environment) if config.environment.used else None
    check_metric(config, source)
    with Grader(deadline_s=config.reward.deadline_s) as grader:  # starts no process before it grades
        if config.reward.functions or not (source and source.rewards):
            build_rewards(config.reward.functions, reward_context(config, grader))
    rundir.check_folder(run_dir, resuming=checkpoints.goes_on(config.training.resume_from_checkpoint))
    checkpoint = checkpoints.find_checkpoint(config.training.resume_from_checkpoint, run_dir)
    checkpoints.require_same_critic(checkpoint, config.algorithm.name, ALGORITHMS[config.algorithm.name].critic)
    checkpoints.check_made(checkpoint, config)
    tokenizer = load_tokenizer(config.model.model_name_or_path)
    check_images(config, tokenizer)
    template = ChatTemplate(tokenizer, config.training.chat_template_kwargs)  # type: ignore[arg-type]
    conversations = open_conversations(config.environment, source, template) if source else None
    template = conversations.template if conversations else template
    check_layers(language_part(config.peft, tokenizer), resolve_model(config.model.model_name_or_path, MODEL_FLAG))
    dataset = build_dataset(
        config.dataset,
        template,
        graded=grades_rows(config.reward.functions),
        limits=limits_of(config.model.model_name_or_path),
        completion=config.training.max_completion_length,
        columns=config.environment.factory is not None,
    )
    check_mixed_rows(dataset, strategy)
    check_tasks(config.reward.functions, {name for name in dataset["task"] if name})
    require_full_batch(config.training, len(dataset))
    if config.algorithm.dynamic_sampling:
        require_whole_groups(config.training)
    if source:
        source.check_rows(dataset)  # type: ignore[arg-type]
    validation = set_up_validation(config, template, set(dataset[PROBLEM]), conversations)
    if source:
        check_patience(config, source, validation)
    check_cluster(config)
    problems, dataset = dataset[PROBLEM], dataset.remove_columns(PROBLEM)
    return Checked(
        tokenizer=tokenizer,
        dataset=dataset,
        problems=list(problems),
        checkpoint=checkpoint,
        conversations=conversations,
        validation=validation,
    )


def check_cluster(config: Config) -> None:
    """What workers over Ray need is there; by the process that asks it again when the model is loaded."""
    rollout = config.rollout
    if rollout.workers and rollout.executor == "ray" and config.training.process_index == 0:
        base = resolve_model(config.model.model_name_or_path, MODEL_FLAG)
        paths = tuple(str(path) for path in (base, *files_of(absolute(config.environment))))
        require_cluster(rollout.workers, rollout.ray_address, _processes_here(config.training), paths)


def _processes_here(training: TrainingConfig) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", training.world_size))


def check_patience(config: Config, source: EnvironmentSource, validation: ValidationSetup | None) -> None:
    """Processes wait for the one whose conversations take longest: where a tool hangs, each call its whole time, and
    those that may not be made at once one after the other."""
    training, environment = config.training, config.environment
    assert training.generation_batch_size
    drawn = 0 if config.rollout.workers else training.generation_batch_size  # workers are waited for without ddp
    scored = [len(each.samples) for each in validation.problem_sets] if validation else []
    rows = math.ceil(max(drawn, *scored, 0) / training.world_size)
    calls = environment.max_turns + (3 if environment.factory else 0)  # made, reset, and asked for the reward
    longest = environment.tool_timeout_s * calls * math.ceil(rows / source.at_once)
    if training.world_size > 1 and longest >= training.ddp_timeout:
        raise UserError(
            f"--config.environment.tool_timeout_s {environment.tool_timeout_s:g}: with {rows} conversations of a"
            f" process, {source.at_once} calls at once and max_turns {environment.max_turns} other processes may wait"
            f" {longest:g} s, and --config.training.ddp_timeout is {training.ddp_timeout} s; write less, or raise"
            " ddp_timeout"
        )


def check_metric(config: Config, source: EnvironmentSource | None) -> None:
    """Whether the environment gives a reward, its class says."""
    metric = config.algorithm.dynamic_sampling_metric
    if config.algorithm.dynamic_sampling and metric == "environment" and not (source and source.rewards):
        raise UserError(
            f"--config.algorithm.dynamic_sampling_metric environment: {config.environment.factory} has no get_reward;"
            f" write one of {', '.join([*config.reward.functions, 'sum'])}"
        )


def check_training(training: TrainingConfig) -> None:
    """Values of GRPOConfig that TRL or transformers would refuse after loading, or fail on."""
    for field, known in CHOICES.items():
        value = str(getattr(training, field))
        lookup(dict.fromkeys(known), value, field.replace("loss_type", "loss"), f"--config.training.{field}")
    check_length(training)
    check_checkpoints(training)
    if training.use_liger_kernel:
        raise UserError(
            "--config.training.use_liger_kernel true: Liger's kernels read memory that is not theirs in a rollout"
            " (liger-kernel 0.8.5 on an H200); leave it out"
        )
    if training.neftune_noise_alpha is not None:
        raise UserError(
            f"--config.training.neftune_noise_alpha {training.neftune_noise_alpha:g}: noise on the embeddings of the"
            " updates alone, so that the ratio is another policy's from the first one on; leave it out, or write"
            " --config.noise_injection.enabled true, with which completions are drawn"
        )
    if training.sync_ref_model:
        raise UserError(
            "--config.training.sync_ref_model: the reference is the model that the run begins with, and never changes;"
            " leave it out"
        )


def check_sampling(training: TrainingConfig) -> None:
    """Values that no distribution has, that no group of completions can learn from, or that the loss would not know."""
    further: Any = training.generation_kwargs or {}
    try:
        if not training.use_vllm:  # vLLM has names of its own
            require_possible(further)
        sampling = rollout_sampling(training, further)
        validate(sampling)
    except (UserError, ValueError, TypeError) as error:  # GenerationConfig checks some itself
        told = " ".join(str(error).split()).removeprefix("--config.training.")
        raise UserError(f"--config.training.{told}") from error
    if training.temperature == 0:
        raise UserError(
            "--config.training.temperature 0: the completions of a group would all be the same; write a number above 0"
        )
    if sampling.temperature == 0:
        raise UserError(
            "--config.training.generation_kwargs: without sampling (do_sample false, temperature 0) the completions of"
            " a group would all be the same; leave it out"
        )
    if sampling.temperature != training.temperature:
        raise UserError(
            f"--config.training.generation_kwargs: temperature {sampling.temperature:g} is not that of the loss; write"
            f" --config.training.temperature {sampling.temperature:g}"
        )


def check_engine(config: Config, strategy: str) -> None:
    """Where vLLM can't be given the policy, vLLM would say so with a traceback, after loading."""
    if config.rollout.piece_size and not config.rollout.workers and strategy:
        raise UserError(
            f"--config.rollout.piece_size {config.rollout.piece_size}: under {strategy} the processes draw together,"
            " not in pieces of their own; write --config.rollout.workers 1 or more, or leave it out"
        )
    if config.rollout.workers and config.rollout.executor == "processes":
        require_room(config.rollout.workers, _processes_here(config.training))
    if config.rollout.workers and config.rollout.executor == "ray" and config.training.process_index == 0:
        require_ray(config.rollout.ray_address, training=True)  # by the process that will ask it
    if config.training.process_index == 0 and (idle := too_many_workers(config)):
        log.warning(idle)
    if strategy == "zero3" and not config.training.ds3_gather_for_generation:
        lag = f"--config.rollout.{'lag' if config.rollout.lag else 'max_staleness'}"
        put_in = [(lag, ahead, "an older policy", 0)] if (ahead := batches_ahead(config.rollout)) else []
        put_in += [("--config.noise_injection.enabled", "true", "noise", "false")] * config.noise_injection.enabled
        for flag, value, what, without in put_in:
            raise UserError(
                f"{flag} {value}: under ZeRO-3 {what} is put into gathered weights, and"
                " --config.training.ds3_gather_for_generation false gathers none; set that to true, or write"
                f" {flag} {without}"
            )
    if not config.training.use_vllm:
        return
    kind, workers = device.detect().kind, config.rollout.workers
    peft_config = ADAPTERS[config.peft.type].build(config.peft)
    why = NO_ADAPTER if peft_config is None else cannot_serve(peft_config.to_dict())
    if why and (workers or not device.VLLM_TAKES_WEIGHTS[kind]):
        where = "in a worker" if workers else f"on a {kind} device"
        raise UserError(
            f"--config.rollout.engine vllm: {where} vLLM takes the adapter alone, but {why}; use"
            " --config.rollout.engine fast"
        )
    require_vllm("--config.rollout.engine vllm (or --config.training.use_vllm true)")


def require_whole_groups(training: TrainingConfig) -> None:
    """It fills the part of the batch of each process by itself, and how many prompts that takes is known afterwards: a
    training by epochs can end only where a step does not begin another rollout."""
    assert training.generation_batch_size
    assert training.num_generations
    assert training.steps_per_generation
    rows = training.generation_batch_size // training.world_size
    if rows % training.num_generations:
        raise UserError(
            f"--config.algorithm.dynamic_sampling true: {rows} completions of a process (per_device_train_batch_size"
            f" {training.per_device_train_batch_size} x steps_per_generation {training.steps_per_generation}) hold no"
            f" whole groups of {training.num_generations}; make them a multiple of --config.training.num_generations,"
            " or write --config.algorithm.dynamic_sampling false"
        )
    if training.max_steps == -1 and Cycle.of(training).length % training.gradient_accumulation_steps:
        raise UserError(
            "--config.algorithm.dynamic_sampling true: in a training by --config.training.num_train_epochs its prompts"
            f" may end in the middle of a step: steps_per_generation {training.steps_per_generation} x num_iterations"
            f" {training.num_iterations} is no multiple of gradient_accumulation_steps"
            f" {training.gradient_accumulation_steps}; write --config.training.max_steps, or make it one"
        )


def require_full_batch(training: TrainingConfig, prompts: int) -> None:
    """A generation batch takes so many different prompts; with fewer, transformers would train no step at all."""
    assert training.generation_batch_size
    assert training.num_generations
    needed = training.generation_batch_size // training.num_generations
    if prompts < needed:
        raise UserError(
            f"--config.dataset: {prompts} prompts, but a generation batch takes {needed} (generation_batch_size"
            f" {training.generation_batch_size} / num_generations {training.num_generations}); give more"
            " rows, or lower per_device_train_batch_size or gradient_accumulation_steps"
        )
