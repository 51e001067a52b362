"""What is checked and looked up before any model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.base.errors import UserError
from perl.base.files import read_json
from perl.base.provenance import text_hash
from perl.config.evaluation import EvalConfig
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
from perl.workers.conversations import identity_of
from perl.workers.executors import Executor, make_executor

MERGE_REPORT = "merge.json"


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
