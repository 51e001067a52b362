"""What is checked and looked up before any model is loaded, and what the workers are started with."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perl import device
from perl.base.errors import UserError
from perl.base.files import read_json
from perl.base.provenance import text_hash
from perl.config.evaluation import EvalConfig, environment_flags, vllm_options
from perl.engines.quantised import SCHEMES, lacking, require_products
from perl.engines.vllm_quantised import linear_layers
from perl.environments.conversation import Conversations, open_conversations
from perl.environments.scored import row_of_sample
from perl.environments.tools import load_environment
from perl.evaluation.candidates import Candidate, find_candidates
from perl.grading import rules_hash
from perl.models.folders import Checkpoint, content_hash, load_config, require_whole_weights, resolve_model
from perl.models.images import has_images, load_processing, tokenizer_of
from perl.prompts import ChatTemplate, require_chat_template, require_known, require_vocabulary
from perl.records import Sample
from perl.scoring.problem_sets import ProblemSet
from perl.scoring.results import Identity
from perl.tasks.trained import trained_with
from perl.workers.conversations import Talks, identity_of
from perl.workers.executors import Executor, make_executor
from perl.workers.worker import EngineJob, Request

log = logging.getLogger(__name__)

MERGE_REPORT = "merge.json"
OF_A_CONVERSATION = ("tools", "factory", "max_turns", "max_observation_tokens", "tool_call_parser")
"""Fields of the environment that its tokens depend on."""
CONTEXT_STEP = 1024
"""vLLM compiles a model again for each length of context, and keeps what it has compiled: few lengths, few times."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is checked and looked up before any model is loaded."""

    config: EvalConfig
    model: Path
    candidates: tuple[Candidate, ...]
    tokenizer: Any
    """The processor of a model that takes images."""
    executor: Executor
    context: int | None
    """Most tokens of prompt and completion together that flags and model allow; None: the model names no limit."""
    vocabulary: int
    """Tokens that the model knows."""
    base_hash: str
    conversations: Conversations | None = None
    """With --environment; None: every sample is one turn."""

    def has_room(self, sample: Sample) -> bool:
        """Whether the prompt leaves any for a completion."""
        return self.context is None or len(sample.token_ids) < self.context

    @classmethod
    def of(cls, config: EvalConfig) -> Setup:
        model = resolve_model(config.model)
        candidates = find_candidates(config.adapter)
        if config.use_vllm:
            from perl.engines.vllm import require_vllm

            require_vllm()
        executor = make_executor(config.executor, config.dp_size, config.tp_size, config.ray_address)
        tokenizer = load_processing(model)
        if config.use_vllm and has_images(tokenizer):
            from perl.engines.vllm import require_torchvision

            require_torchvision()
        require_whole_weights(model, f"--model {config.model}")
        text_config = load_config(model).get_text_config()
        require_chat_template(tokenizer, str(config.model))
        require_vocabulary(tokenizer_of(tokenizer), text_config.vocab_size, str(config.model))
        if config.quantization != "none":
            require_quantisable(config, model, tokenizer, executor.devices.kind)
        conversations = set_up_environment(config, tokenizer) if config.environment.used else None
        allowed = getattr(text_config, "max_position_embeddings", None)
        if config.max_model_len and allowed and config.max_model_len > allowed:
            raise UserError(f"--max_model_len {config.max_model_len}: the model takes {allowed} tokens at most")
        return cls(
            config=config,
            model=model,
            candidates=candidates,
            tokenizer=tokenizer,
            executor=executor,
            context=config.max_model_len or allowed,
            vocabulary=text_config.vocab_size,
            base_hash=content_hash(model),
            conversations=conversations,
        )

    def require_known(self, problem_set: ProblemSet) -> None:
        """Raise a UserError for a prompt that holds other tokens than the model's."""
        for sample in problem_set.samples:
            require_known(sample.token_ids, self.vocabulary, sample.problem.source)

    def require_rows(self, problem_set: ProblemSet) -> None:
        """Raise a UserError for a problem that lacks what the environment's reset needs."""
        if self.conversations is not None and self.conversations.source.needed:
            with own_flags():
                self.conversations.source.check_rows([row_of_sample(sample) for sample in problem_set.samples])

    @property
    def template(self) -> ChatTemplate:
        """What words the prompts."""
        if self.conversations is not None:
            return self.conversations.template
        return ChatTemplate(self.tokenizer, self.config.chat_template_kwargs)

    @property
    def is_sweep(self) -> bool:
        return bool(self.candidates[0].name)

    @property
    def engine(self) -> str:
        """Key of ENGINES."""
        return "vllm" if self.config.use_vllm else "hf"

    def folder(self, candidate: Candidate) -> Path:
        return Path(self.config.result_dir) / candidate.name

    def identity(self, candidate: Candidate, problem_set: ProblemSet) -> Identity:
        """What every row of a dataset's folder has in common. Not in it: what does not change a row, such as the
        number of devices, and how many rows there are."""
        return {
            **problem_set.asked,
            "base_hash": self.base_hash,
            "adapter_hash": candidate.adapter_hash,
            "adapter_mode": self.config.adapter_mode if candidate.adapter else None,
            "dtype": self.config.dtype,
            "quantization": None if self.config.quantization == "none" else self.config.quantization,
            "max_model_len": self.config.max_model_len,
            "chat_template_hash": text_hash(self.tokenizer.chat_template),
            "split": self.config.split,
            "environment": identity_of(self.config.environment),
            "grading_hash": rules_hash(),
        }

    def merge_report(self, candidate: Candidate) -> dict[str, Any] | None:
        """What is known of the merge of this model and adapter."""
        file = self.folder(candidate) / MERGE_REPORT
        if candidate.adapter is None or self.config.adapter_mode != "merge" or not file.is_file():
            return None
        report = read_json(file)
        same = (report.get("base_hash"), report.get("adapter_hash")) == (self.base_hash, candidate.adapter_hash)
        return report if same else None


@contextlib.contextmanager
def own_flags() -> Iterator[None]:
    """The group's flags begin with --config in a training, whose words errors are in."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--config.environment", "--environment")) from error


def set_up_environment(config: EvalConfig, tokenizer: Any) -> Conversations:
    """What --environment names, tried here once; each worker has its own."""
    with own_flags():
        source = load_environment(config.environment)
        template = ChatTemplate(tokenizer, config.chat_template_kwargs)
        conversations = open_conversations(config.environment, source, template)
        with source.opened():
            return conversations


def require_quantisable(config: EvalConfig, model: Path, tokenizer: Any, kind: str) -> None:
    """Raise a UserError where --quantization can't be had of a model on this kind of device."""
    flag = f"--quantization {config.quantization}"
    if has_images(tokenizer):
        raise UserError(f"{flag}: is of models of text alone; write none")
    require_products(kind, config.quantization, flag, None if config.use_vllm else "--use_vllm")
    here = config.executor == "local" and not config.use_vllm  # a cluster's nodes say it themselves
    if here and (why := lacking(SCHEMES[config.quantization], kind)):
        raise UserError(f"{flag}: {why}; write none")
    linear_layers(model, Checkpoint(model), SCHEMES[config.quantization], flag)


def warn_of_training(config: EvalConfig, folders: Iterable[Path]) -> None:
    """One line for each way in which adapters or models were trained otherwise than they are scored."""
    told = set[str]()
    for folder in folders:
        for group, differs in DIFFERS.items():
            if (how := differs(config, trained_with(folder, group))) and how not in told:
                told.add(how)
                log.warning("%s was trained %s", folder, how)


def _in_conversations(config: EvalConfig, environment: dict[str, Any]) -> str | None:
    if not (flags := environment_flags(environment)):
        return None
    if not config.environment.used:
        return f"in conversations, and its first turn alone is scored; write {shlex.join(flags)}"
    ours = asdict(config.environment)
    if other := [name for name in OF_A_CONVERSATION if _named(ours[name]) != _named(environment.get(name, ours[name]))]:
        return f"in conversations of other settings ({', '.join(other)}); write {shlex.join(flags)}"
    return None


def _named(value: Any) -> Any:
    """A user's file by its name: it may have moved, and each command has its own working directory."""
    if isinstance(value, list):
        return [_named(item) for item in value]
    return Path(value).name if isinstance(value, str) else value


def _above_another_base(config: EvalConfig, rollout: dict[str, Any]) -> str | None:
    trained = rollout.get("quantization")
    if not isinstance(trained, str) or trained == config.quantization:
        return None
    how = f"--quantization {trained}" + ("" if trained == "none" else " --use_vllm --adapter_mode lora")
    if trained not in ("none", *device.VLLM_QUANTIZES[device.detect().kind]):
        how = "--config.validation.quantized true in the training, as vLLM has no such products here"
    return (
        f"with --config.rollout.quantization {trained}, and is scored with --quantization {config.quantization}: as it"
        f" drew in training it is scored by {how}"
    )


def _by_other_arguments(config: EvalConfig, training: dict[str, Any]) -> str | None:
    given = training.get("chat_template_kwargs")
    if not given or given == config.chat_template_kwargs:
        return None
    return f"with other prompts: write --chat_template_kwargs {shlex.quote(json.dumps(given))}"


def _after_another_system_turn(config: EvalConfig, dataset: dict[str, Any]) -> str | None:
    text = dataset.get("system_prompt")
    if not isinstance(text, str) or text == config.system_prompt:
        return None
    word = shlex.quote(text) if text.isprintable() else f"$'{repr(text + chr(34))[1:-2]}'"  # bash's own escapes
    return f"with other prompts: write --system_prompt {word}"


DIFFERS: dict[str, Callable[[EvalConfig, dict[str, Any]], str | None]] = {
    "environment": _in_conversations,
    "rollout": _above_another_base,
    "training": _by_other_arguments,
    "dataset": _after_another_system_turn,
}
"""Group of a training's configuration -> how it differs from the evaluation's, in words; None: in nothing."""


def make_job(setup: Setup, samples: Collection[Sample]) -> EngineJob:
    """What the workers do to complete `samples`."""
    options = engine_options(setup, samples)
    if setup.conversations is None:
        return EngineJob(setup.engine, options)
    template = ChatTemplate(setup.tokenizer, setup.config.chat_template_kwargs)
    talks = Talks.of(setup.config.environment, template)
    return EngineJob(setup.engine, options | {"ends": [setup.conversations.template.end]}, talks, setup.context)


def request_of(setup: Setup, sample: Sample) -> Request:
    return Request(sample.id, sample.prompt, row_of_sample(sample) if setup.conversations else None)


def engine_options(setup: Setup, samples: Collection[Sample]) -> dict[str, Any]:
    """What the engines are built with to complete `samples`."""
    config = setup.config
    options: dict[str, Any] = {"tp_size": config.tp_size, "max_model_len": needed_context(setup, samples)}
    if config.max_batch_tokens:
        options["max_batch_tokens"] = config.max_batch_tokens
    if config.quantization != "none":
        options["quantization"] = config.quantization
    if served := sorted({sample.adapter for sample in samples if sample.adapter is not None}):
        options["adapters"] = served
    return options | vllm_options(config)


def needed_context(setup: Setup, samples: Iterable[Sample]) -> int:
    """Tokens of the longest prompt and completion of `samples`, within what is allowed: a cache for a context of 128k
    that nobody uses would not fit. Rounded up for vLLM, to CONTEXT_STEP. All that is allowed where an environment's
    reset may add to the prompts."""
    if setup.config.environment.factory is not None and setup.context:
        return setup.context
    needed = max(len(sample.token_ids) + sample.sampling.max_new_tokens for sample in samples)
    if setup.config.use_vllm:
        needed = math.ceil(needed / CONTEXT_STEP) * CONTEXT_STEP
    return min(needed, setup.context) if setup.context else needed
