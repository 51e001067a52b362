"""What a run is validated on: checked, loaded and worded before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.adapters import ADAPTERS
from perl.adapters.none import autocast_dtype
from perl.base.errors import UserError
from perl.config.derived import scored_quantizations, validates_by_vllm
from perl.config.schema import ValidationConfig
from perl.engines.sampling import validate
from perl.environments.conversation import Conversations
from perl.environments.scored import row_of_sample
from perl.models import folders
from perl.models.folders import resolve_model
from perl.models.images import tokenizer_of
from perl.prompts import ChatTemplate
from perl.runs.setup import merged_base, model_dtype
from perl.scoring.problem_sets import ProblemSet, make_problem_set, named
from perl.tasks import load_problems
from perl.tasks.trained import asked_hash

if TYPE_CHECKING:
    from perl.config.load import Config

log = logging.getLogger(__name__)

FLAG = "--config.validation."
GIVEN = ("n", "temperature", "top_p", "top_k", "max_new_tokens")
"""Fields of Sampling that the group `validation` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSetup:
    """What a run validates on, and where completions end: as the evaluator's do, whatever TRL's generation config and
    the run's generation_kwargs say."""

    config: ValidationConfig
    problem_sets: tuple[ProblemSet, ...]
    eos_token_ids: frozenset[int]
    context: int | None
    """Most tokens of prompt and completion together; None: the model names no limit."""
    model: Path
    """Folder of the base that is trained on; of one that holds an earlier adapter, before it is written."""
    start: str | None
    """The adapter that is trained further; None: a new one, which changes nothing before the first step."""
    tokenizer: Any
    conversations: Conversations | None = None
    """The run's, with an environment; None: every sample is one turn."""
    scored: tuple[str, ...] = ("none",)
    """Quantisations of the base, of which each is scored."""
    trained: str = "adapter"
    """What the training changes, by the name of its folder: "adapter", or "model" where all weights are trained."""
    engine: str = "hf"
    """Of ENGINES, what completes."""
    tp_size: int = 1
    """Processes that share one."""
    dtype: str | None = None
    """That it computes in; None: vLLM's, which chooses its own."""


def set_up_validation(
    config: Config,
    template: ChatTemplate,
    trained: Collection[str],
    conversations: Conversations | None = None,
) -> ValidationSetup | None:
    """The samples of every dataset, None where none is named. A UserError names the flag.

    Args:
        template: what words the prompts.
        trained: perl.tasks.trained.asked_hash of each problem that the run trains on.
        conversations: the run's, with an environment.
    """
    validation = config.validation
    if not validation.datasets:
        return None
    model = resolve_model(config.model.model_name_or_path, "--config.model.model_name_or_path")
    model_config = folders.load_config(model)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if validates_by_vllm(config) and (limit := config.training.vllm_max_model_length):
        context = min(limit, context or limit)
    asked = validation.max_new_tokens
    if asked is not None and context is not None and asked >= context:
        raise UserError(
            f"{FLAG}max_new_tokens {asked}: the model takes {context} tokens of prompt and completion together; write"
            " less"
        )
    specs = named(validation.datasets, f"{FLAG}datasets", "leave one out")
    problem_sets = [_problem_set(config, spec, name, template, conversations) for name, spec in specs.items()]
    for problem_set in problem_sets:
        _warn_of_trained(problem_set, trained)
    merges = config.peft.adapter is not None and config.peft.adapter_mode == "merge"
    return ValidationSetup(
        config=validation,
        problem_sets=tuple(problem_sets),
        eos_token_ids=folders.eos_token_ids(model, model_config, tokenizer_of(template.tokenizer))
        | ({conversations.template.end} if conversations else set()),
        context=context,
        model=merged_base(config) if merges else model,
        start=None if merges else config.peft.adapter,
        tokenizer=template.tokenizer,
        conversations=conversations,
        scored=scored_quantizations(config),
        trained=ADAPTERS[config.peft.type].result,
        engine="vllm" if validates_by_vllm(config) else "hf",
        tp_size=config.training.vllm_tensor_parallel_size if validates_by_vllm(config) else 1,
        dtype=None if validates_by_vllm(config) else _computed_in(config),
    )


def _computed_in(config: Config) -> str:
    """The dtype: mixed precision's, or that of the base's weights."""
    mixed = autocast_dtype(config.training)
    return str(mixed if mixed.itemsize < 4 else model_dtype(config)).removeprefix("torch.")


def _problem_set(
    config: Config, spec: str, name: str, template: ChatTemplate, conversations: Conversations | None
) -> ProblemSet:
    validation = config.validation
    try:
        columns = config.environment.factory is not None
        graded = not (conversations and conversations.source.rewards)
        problems = load_problems(spec, limit=validation.max_samples, graded=graded, columns=columns)
    except UserError as error:
        raise UserError(f"{FLAG}datasets: {error}") from error
    given = {field: value for field in GIVEN if (value := getattr(validation, field)) is not None}
    made = make_problem_set(problems, spec, name, template, given, config.dataset.system_prompt, flag=FLAG)
    if conversations and conversations.source.needed:
        conversations.source.check_rows([row_of_sample(sample) for sample in made.samples])
    validate(made.sampling)
    return made


def _warn_of_trained(problem_set: ProblemSet, trained: Collection[str]) -> None:
    scored = {asked_hash(problem) for problem in problem_set.problems.values()}
    if both := len(scored & set(trained)):
        log.warning("%sdatasets %s: the run trains on %d of its %d problems", FLAG, problem_set.spec, both, len(scored))
