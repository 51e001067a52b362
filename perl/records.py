"""The records that the stages exchange.

Task --Problem--> prompts --Prompt--> Engine --Completion--> grading --Grade--> rewards | evaluation

In an evaluation the Prompt is a Sample, which knows its place, and a line of samples.jsonl
(perl.scoring.results.SampleRecord) is made of Sample, Completion and Grade.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from perl.base.errors import UserError

Message = dict[str, Any]
"""One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": text}; for a model that takes images
content is a list of parts, {"type": "text", "text": …} and {"type": "image"} (perl.models.images)."""


PROGRESS = "progress: "
"""Start of a progress line of the training: whoever runs it shows these lines and keeps the others in a log."""


def clock(seconds: float) -> str:
    """h:mm:ss, as progress lines and pages show a duration."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row of a task, as its source gave it."""

    task: str
    """Name of the Task that grades it, a key of TASKS. Empty: none does."""
    question: str
    """The bare question, without any template. Empty when `messages` is given."""
    gold: str
    """The reference answer in the form the task's rules expect ("18", not the derivation). Empty: the row has none."""
    messages: tuple[Message, ...] | None = None
    """A ready-made prompt (verl's and the original DAPO schema); used verbatim instead of the task's template."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """The files of the images that `<image>` in its text stands for, in their order."""
    source: str = ""
    """Where the row came from ("train.jsonl:17"), for messages to the user."""
    data_source: str = ""
    """verl's name of the data: the row's own, else the task's."""
    ground_truth: Any = field(default=None, compare=False)
    """The answer as rewards in verl's form see it: `reward_model.ground_truth` as stored, else `gold`."""
    extra_info: dict[str, Any] = field(default_factory=dict, compare=False)
    """verl's column of that name."""
    columns: dict[str, Any] = field(default_factory=dict, compare=False)
    """The row's columns, for an environment's reset, where it was read for one."""

    @property
    def gradable(self) -> bool:
        """Its task grades it. Else rewards of the user's own do, or an environment's."""
        return bool(self.task and self.gold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are drawn. temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 are off."""

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0
    """Seed of the run; each completion's own seed is derived from it (row_seed)."""

    @property
    def truncates(self) -> bool:
        """Tokens are drawn from another distribution than softmax(logits / temperature)."""
        return self.top_p != 1.0 or self.top_k != 0 or self.min_p != 0.0 or self.repetition_penalty != 1.0

    @property
    def distribution(self) -> Sampling:
        """Without what each completion has for itself."""
        return replace(self, n=1, seed=0, max_new_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What an engine completes once. Asking for n completions of a problem makes n prompts."""

    token_ids: tuple[int, ...]
    seed: int
    """Seed of this completion alone: it does not depend on the batch, the order or the device."""
    sampling: Sampling = Sampling()
    """How its tokens are drawn; `n` and `seed` there are of the run."""
    follows: int | None = None
    """Position in the feed of the prompt that this one goes on from, its completion included: what was computed of it
    may be there still."""
    followed: bool = False
    """Another one may follow it."""
    adapter: str | None = None
    """Folder of the adapter that completes it, one of those that the engine serves alongside its model; None: none."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """The files of its images; in `token_ids` each has as many tokens as the model sees of it."""

    def room(self, context: int | None) -> int:
        """Most new tokens behind it within `context` tokens; None: of any number. A UserError where it leaves no room
        for one."""
        if not self.token_ids:
            raise UserError("a prompt is empty; give it at least one token")
        if context is None:
            return self.sampling.max_new_tokens
        if len(self.token_ids) >= context:
            raise UserError(
                f"a prompt has {len(self.token_ids)} tokens, and the context holds {context} with the completion;"
                " shorten the prompt, leave it out, or raise --max_model_len if the model allows more"
            )
        return min(self.sampling.max_new_tokens, context - len(self.token_ids))


def row_seed(seed: int, key: str, index: int, turn: int = 0) -> int:
    """Seed of the `index`-th completion of the row `key`, or of a later turn of its conversation: 63 bits that depend
    on these values alone, so that neither the order of rows nor the number of devices changes a completion."""
    words = f"{seed}\x1f{key}\x1f{index}" + (f"\x1f{turn}" if turn else "")
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


SampleId = tuple[str, str, int]
"""(dataset, key, index) of a Sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Prompt):
    """One completion to make and to grade: a Prompt that knows which problem of which dataset it belongs to."""

    dataset: str
    """Folder of the dataset below the result folder: "gsm8k", in a sweep "checkpoint-10/gsm8k"."""
    key: str
    """The problem: a hash of its content, and its occurrence among equal ones ("9f0c…-0")."""
    index: int
    """Which of the problem's n completions."""
    problem: Problem
    prompt_text: str
    """What `token_ids` say, chat template included."""
    messages: tuple[Message, ...] = field(default=(), repr=False)
    """That `token_ids` are made of."""

    @property
    def id(self) -> SampleId:
        return self.dataset, self.key, self.index

    @property
    def prompt(self) -> Prompt:
        """What an engine reads of it."""
        return Prompt(**{each.name: getattr(self, each.name) for each in fields(Prompt)})


@dataclass(frozen=True, slots=True, order=True)
class Weights:
    """Which policy draws."""

    version: int = 0
    """Optimizer steps."""
    sigma: float = 0.0
    """Standard deviation of the noise on its norm weights (AQN)."""
    draw: int = 0
    """Draws of this version before it; with `version` it names the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine gives back for one Prompt. perl.prompts.decode makes text of it."""

    token_ids: tuple[int, ...]
    """Generated tokens, without the prompt, the end-of-sequence token included."""
    logprobs: tuple[float, ...] = field(default=(), compare=False)
    """log_softmax(model logits / temperature) of each token, in nats, by the engine; empty where it makes none."""
    finish_reason: Literal["stop", "length"]
    """"stop": by an end-of-sequence token, the last of `token_ids`. "length": cut off at max_new_tokens, so the answer
    may be missing for that reason alone."""
    seconds: float = field(default=0.0, compare=False)
    """From the engine's taking the prompt to its end, where somebody measured it."""
    error: str | None = None
    """Why nothing was generated."""
    weights: Weights | None = field(default=None, compare=False)
    """That drew it, where the engine does not draw with those that were published last."""

    @classmethod
    def failed(cls, error: str) -> Completion:
        """An empty, truncated one."""
        return cls(token_ids=(), finish_reason="length", error=error)

    @property
    def sampled_ids(self) -> Sequence[int]:
        """All of `token_ids`."""
        return self.token_ids

    @property
    def content_ids(self) -> tuple[int, ...]:
        """`token_ids` without the end-of-sequence token."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Talked(Completion):
    """A conversation with an environment. `token_ids` are those that were drawn, of all its turns; `finish_reason` is
    that of the last; `error` says why it could not go on."""

    messages: tuple[Message, ...]
    """Behind the prompt: each turn, its calls apart, and what was observed after it."""
    text: str
    """Of the last turn, which is graded; empty where the conversation could not go on."""
    turns: int
    observed: int
    """Tokens."""
    reward: float | None
    """By the environment itself."""
    prompt_text: str
    """As the first turn saw it: with what `reset` has changed of the sample's."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How the turns of a trajectory are drawn."""

    sampling: Sampling
    """Its max_new_tokens are of all turns together, and of what is observed between them."""
    key: str
    """By the sampling's seed, this, the trajectory's sample and the turn each completion has its seed."""
    longest: int | None = None
    """Tokens that it may reach, its prompt included; None: any number."""
    adapter: str | None = None
    """As in Prompt."""


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """One answer to a prompt: what was drawn, by which policy, and what it earned. Its tokens are lists on the host
    until they are packed."""

    row: dict[str, Any] = field(repr=False)
    """Of the data set: what reward functions get as columns."""
    position: int
    """The prompt's place in the stream (perl.training.stream)."""
    sample: int
    """Place among the completions of its prompt."""
    prompt_ids: tuple[int, ...]
    images: tuple[bytes, ...] = field(default=(), repr=False)
    asked: Asked | None = field(default=None, repr=False)
    """None: of a checkpoint, drawn to its end."""
    token_ids: list[int] = field(default_factory=list)
    """Behind the prompt."""
    sampled: list[bool] = field(default_factory=list)
    """Of each of `token_ids`: the policy drew it. The only mask that loss, advantages and metrics know."""
    logprobs: list[float] = field(default_factory=list)
    """Of each, by the engine, in nats, NaN where it gave none; empty where it gives none at all."""
    turns: int = 0
    """Completions among them."""
    weights: Weights = Weights()
    """That drew it."""
    finish: Literal["stop", "length"] = "length"
    completion: Any = None
    """As reward functions read it: a list of messages, or a text where the prompt is one."""
    rewards: list[float] = field(default_factory=list)
    """Of each reward function, NaN where it gave none."""
    baseline: list[float] = field(default_factory=list)
    """The same of the greedy completion of its prompt; empty where the algorithm asks for none."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What reward functions have logged of it, by column."""
    environment: Any = field(default=None, repr=False)
    """What has answered (perl.environments), until the rewards are known."""
    environment_reward: float | None = None
    """By the environment itself."""
    outcomes: list[bool] = field(default_factory=list)
    """Of each call of a tool: it has failed."""
    failure: str | None = None
    """Why the conversation could not go on; it has no reward then."""

    @property
    def sampled_ids(self) -> list[int]:
        """What the policy drew of `token_ids`."""
        return [token for token, drawn in zip(self.token_ids, self.sampled, strict=True) if drawn]

    def next_prompt(self) -> Prompt:
        """What is drawn next of it, in as many tokens as are left to it: 0 or less where there are none."""
        asked, token_ids = self.asked, self.prompt_ids + tuple(self.token_ids)
        assert asked is not None
        left = asked.sampling.max_new_tokens - len(self.token_ids)
        if asked.longest is not None:
            left = min(left, asked.longest - len(token_ids))
        return Prompt(
            token_ids=token_ids,
            seed=row_seed(asked.sampling.seed, asked.key, self.sample, self.turns),
            sampling=replace(asked.sampling, max_new_tokens=left),
            adapter=asked.adapter,
            images=self.images,
        )

    def observe(self, token_ids: Sequence[int]) -> None:
        """What stands behind the tokens so far and was not drawn."""
        self.token_ids += token_ids
        self.sampled += [False] * len(token_ids)

    def add(self, completion: Completion) -> None:
        """What the engine has drawn behind the tokens so far."""
        drawn = len(completion.token_ids)
        if completion.logprobs or self.logprobs:
            self.logprobs += [math.nan] * (len(self.token_ids) - len(self.logprobs))
            self.logprobs += completion.logprobs or [math.nan] * drawn
        self.token_ids += completion.token_ids
        self.sampled += [True] * drawn
        self.finish = completion.finish_reason
        self.turns += 1
        self.weights = completion.weights or self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The verdict on one completion."""

    score: float
    """The primary rule's score, 0.0 or 1.0: the reward and the accuracy are made of this number."""
    scores: dict[str, float] = field(default_factory=dict)
    """Each rule's score by rule name, for side-by-side reporting."""
    extracted: str | None = None
    """The answer the primary rule (or the rule that gave the point) read, or None."""
    reason: Literal["correct", "wrong", "unextracted", "timeout", "error"] = "wrong"

    def as_dict(self) -> dict[str, Any]:
        return {"score": self.score, "scores": self.scores, "extracted": self.extracted, "reason": self.reason}
