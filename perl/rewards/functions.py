"""Rewards by name: thin functions over grading, so that training is rewarded by the evaluator's own verdicts.

Each is called as TRL 1.16 calls a reward function: `(prompts, completions, completion_ids, **columns)` with one entry
per completion, and gives one float per completion. Columns that ours read: `gold` and `task` of each row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from perl.base.errors import UserError, lookup
from perl.config.load import Config
from perl.grading import RULES, Grader
from perl.records import Grade
from perl.rewards.files import (
    FLAG,
    KWARGS_FLAG,
    OF_ENVIRONMENTS,
    RewardFunction,
    Texts,
    is_file,
    load_reward,
    text_of,
)
from perl.tasks import TASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What rewards need to know of the run."""

    grader: Grader
    max_completion_length: int
    """Tokens after which a completion is cut off."""
    overlong_cache_length: int
    """The last tokens of max_completion_length over which `overlong` falls from 0 to -1."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the user's own rewards in verl's form."""
    of_environments: Sequence[str] = ()
    """What rewards are given of the environments of their conversations, by keyword."""


def reward_context(config: Config, grader: Grader) -> RewardContext:
    return RewardContext(
        grader=grader,
        max_completion_length=config.training.max_completion_length,
        overlong_cache_length=int(config.reward.overlong_cache_length),
        kwargs=config.reward.kwargs,
        of_environments=given_of_environments(config),
    )


def given_of_environments(config: Config) -> Sequence[str]:
    """What of OF_ENVIRONMENTS rewards are given: the environments themselves are where the rollouts are."""
    if not config.environment.used:
        return ()
    return [name for name in OF_ENVIRONMENTS if name != "environments" or not config.rollout.workers]


GradeEarly = Callable[[str, dict[str, Any]], Future[Any] | None]
"""Begins to grade a completion, given its text and its row of the data set; done when its rewards need not wait, None
where they never must."""


def grade_early(functions: Sequence[str], context: RewardContext) -> GradeEarly | None:
    """What begins to grade one completion of a rollout while others are still drawn; None where no reward grades."""
    if not any(reward.graded for reward in _by_name(functions).values()):
        return None

    def start(text: str, row: dict[str, Any]) -> Future[Any] | None:
        return context.grader.start(TASKS[row["task"]].rubric, text, row["gold"])

    return start


def accuracy(context: RewardContext) -> RewardFunction:
    """1 for a correct answer, else 0: `Grade.score` of the row's task, as in the evaluation.

    Logs grading/timeout, grading/unextracted and grading/error, each as a share of the completions.
    """

    def reward(
        completions: Texts,
        gold: Sequence[str],
        task: Sequence[str],
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float]:
        grades = grade_rows(context.grader, [text_of(c) for c in completions], gold, task)
        if log_metric is not None:
            reasons = Counter(grade.reason for grade in grades)
            for reason in ("timeout", "unextracted", "error"):
                log_metric(f"grading/{reason}", reasons[reason] / len(grades))
        return [grade.score for grade in grades]

    return reward


def strict(context: RewardContext) -> RewardFunction:
    """verl's reward for GSM8K: 1 when the last `#### n` of the completion's end is the answer, else 0. Any other way to
    state it, `\\boxed{n}` or `#### $n`, counts nothing."""
    rule = RULES["verl_strict"]

    def reward(completions: Texts, gold: Sequence[str], **_: Any) -> list[float]:
        return [float(rule.accepts(text_of(c), answer)) for c, answer in zip(completions, gold, strict=True)]

    return reward


def format_(context: RewardContext) -> RewardFunction:
    """1 when the completion states an answer, right or wrong, in the form its task's prompt asks for, else 0."""

    def reward(completions: Texts, task: Sequence[str], **_: Any) -> list[float]:
        rules = [RULES[TASKS[name].rubric.form] for name in task]
        return [float(rule.extract(text_of(c)) is not None) for rule, c in zip(rules, completions, strict=True)]

    return reward


def think(context: RewardContext) -> RewardFunction:
    """verl's format reward for geometry3k (verl/utils/reward_score/geo3k.py): 1 when the completion begins with
    `<think>`, and behind a `</think>` stands a `\\boxed{…}`, else 0. verl gives it weight 0.1, and accuracy 0.9."""

    def reward(completions: Texts, **_: Any) -> list[float]:
        return [float(_thinks(text_of(c))) for c in completions]

    return reward


def _thinks(text: str) -> bool:
    reasoning, closed, rest = text.partition("</think>")
    _, box, answer = rest.partition("\\boxed{")
    return reasoning.startswith("<think>") and bool(closed and box) and "}" in answer


def overlong(context: RewardContext) -> RewardFunction:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to L_max - L_cache tokens, then falling
    linearly to -1 at L_max. Lengths are in tokens, of all behind the prompt: observed ones are in the budget too."""
    longest, cache = context.max_completion_length, context.overlong_cache_length
    if not 0 < cache <= longest:
        raise UserError(
            f"--config.reward.overlong_cache_length {cache}: must be between 1 and"
            f" --config.training.max_completion_length, which is {longest}"
        )

    def reward(
        completion_ids: Sequence[Sequence[int]], completion_lengths: Sequence[int] | None = None, **_: Any
    ) -> list[float]:
        lengths = completion_lengths or [len(ids) for ids in completion_ids]
        return [max(-1.0, min(0.0, (longest - cache - length) / cache)) for length in lengths]

    return reward


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward by name, and what it reads."""

    build: Callable[[RewardContext], RewardFunction]
    answered: bool = True
    """Whether it reads `gold` or `task`, so that every row must have them."""
    graded: bool = False
    """Whether the grader gives it, which may begin while other completions are drawn."""
    form: str | None = None
    """Key of RULES: the one form of an answer that it takes; None: that of each row's task, or none."""


REWARDS: dict[str, Reward] = {
    "accuracy": Reward(accuracy, graded=True),
    "strict": Reward(strict, form="strict"),
    "format": Reward(format_),
    "think": Reward(think, answered=False),
    "overlong": Reward(overlong, answered=False),
}


def _by_name(names: Sequence[str]) -> dict[str, Reward]:
    return {name: REWARDS[name] for name in names if name in REWARDS}


def build_rewards(names: Sequence[str], context: RewardContext) -> list[RewardFunction]:
    """The reward functions that `names` lists: keys of REWARDS, or `path/to/file.py:function` of the user's own with
    that signature, or of one of verl's (perl/rewards/files.py). TRL logs each under its `__name__`."""
    check_rewards(names, context.kwargs, context.of_environments)
    functions = []
    for name in names:
        own = is_file(name)
        function = load_reward(name, context.kwargs, context.of_environments) if own else REWARDS[name].build(context)
        function.__name__ = logged_name(name)
        functions.append(function)
    return functions


def logged_name(name: str) -> str:
    """What TRL's metrics, and dynamic sampling, know a reward by."""
    return name.rpartition(":")[2]


def check_rewards(
    names: Sequence[str], kwargs: Mapping[str, Any] | None = None, of_environments: Sequence[str] = ()
) -> None:
    """Raise a UserError unless every name can be built."""
    if not names:
        raise UserError(f"{FLAG}: no reward; known: {', '.join(REWARDS)}, or path/to/file.py:function")
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{FLAG}: {name!r} stands there {count} times; give it a larger weight instead")
        if is_file(name):
            load_reward(name, kwargs or {}, of_environments)
        else:
            lookup(REWARDS, name, "reward", FLAG)
    for name, count in Counter(map(logged_name, names)).items():
        if count > 1:
            both = " and ".join(repr(each) for each in names if logged_name(each) == name)
            raise UserError(f"{FLAG}: {both} would be logged as one, {name}; give one of the functions another name")
    if kwargs and not any(map(is_file, names)):
        raise UserError(f"{KWARGS_FLAG}: {', '.join(kwargs)} is for a function of your own; {FLAG} names none")


def grades_rows(names: Sequence[str]) -> bool:
    """Whether a reward needs each row's task and answer."""
    return any(reward.answered for reward in _by_name(names).values())


def check_tasks(names: Sequence[str], tasks: Collection[str]) -> None:
    """Raise a UserError where a reward could never be earned on rows of these tasks."""
    for name, reward in _by_name(names).items():
        form = reward.form
        other = sorted(task for task in tasks if form not in (None, TASKS[task].rubric.form))
        if form and other:
            right = next(task for task in TASKS if TASKS[task].rubric.form == form)
            raise UserError(
                f"{FLAG} {name}: only `{RULES[form].state('n')}` counts, but the prompts of task {other[0]} ask for"
                f" {RULES[TASKS[other[0]].rubric.form].state('n')}; use accuracy, or --config.dataset.task {right}"
            )


def grade_rows(grader: Grader, texts: Sequence[str], golds: Sequence[str], tasks: Sequence[str]) -> list[Grade]:
    """Grade rows that may belong to different tasks, in order. One without a task or an answer (""), which an
    environment scores, has score 0 and reason "error" until then."""
    asked = [i for i, (gold, task) in enumerate(zip(golds, tasks, strict=True)) if gold and task]
    grades = dict.fromkeys(range(len(texts)), Grade(score=0.0, reason="error"))
    for name in dict.fromkeys(tasks[i] for i in asked):
        rows = [i for i in asked if tasks[i] == name]
        rubric = lookup(TASKS, name, "task").rubric
        grades |= zip(rows, grader.grade(rubric, [texts[i] for i in rows], [golds[i] for i in rows]), strict=True)
    return [grades[i] for i in range(len(texts))]
