"""Rewards by name: thin functions over grading, so that training is rewarded by the evaluator's own verdicts.

Each is called as TRL 1.16 calls a reward function: `(prompts, completions, completion_ids, **columns)` with one entry
per completion, and gives one float per completion. Columns that ours read: `gold` and `task` of each row.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from perl.config.load import Config
from perl.errors import UserError, lookup
from perl.grading import RULES, Grader
from perl.records import Grade
from perl.tasks import TASKS

RewardFunction = Callable[..., Any]
Texts = Sequence[str | Sequence[dict[str, Any]]]
FLAG = "--config.reward.functions"
GIVEN = ("completions", "completion_ids", "prompts", "gold", "task", "trainer_state", "log_extra", "log_metric")
"""What TRL calls a reward with: our data set's columns and TRL's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What rewards need to know of the run."""

    grader: Grader
    max_completion_length: int
    """Tokens after which a completion is cut off."""
    overlong_cache_length: int
    """The last tokens of max_completion_length over which `overlong` falls from 0 to -1."""


def reward_context(config: Config, grader: Grader) -> RewardContext:
    return RewardContext(
        grader=grader,
        max_completion_length=config.training.max_completion_length or 0,
        overlong_cache_length=int(config.reward.overlong_cache_length),
    )


def grade_early(functions: Sequence[str], context: RewardContext) -> Callable[[str, dict[str, Any]], None] | None:
    """What begins to grade one completion of a rollout, given its text and its row of the data set, while others are
    still drawn; None where no reward grades."""
    if "accuracy" not in functions:
        return None

    def start(text: str, row: dict[str, Any]) -> None:
        context.grader.start(TASKS[row["task"]].rubric, text, row["gold"])

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
        grades = grade_rows(context.grader, [_text(c) for c in completions], gold, task)
        if log_metric is not None:
            reasons = Counter(grade.reason for grade in grades)
            for reason in ("timeout", "unextracted", "error"):
                log_metric(f"grading/{reason}", reasons[reason] / len(grades))
        return [grade.score for grade in grades]

    return reward


def format_(context: RewardContext) -> RewardFunction:
    """1 when the completion states an answer, right or wrong, in the form its task's prompt asks for, else 0."""

    def reward(completions: Texts, task: Sequence[str], **_: Any) -> list[float]:
        rules = [RULES[TASKS[name].rubric.form] for name in task]
        return [float(rule.extract(_text(c)) is not None) for rule, c in zip(rules, completions, strict=True)]

    return reward


def overlong(context: RewardContext) -> RewardFunction:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to L_max - L_cache tokens, then falling
    linearly to -1 at L_max. Lengths are in tokens."""
    longest, cache = context.max_completion_length, context.overlong_cache_length
    if not 0 < cache <= longest:
        raise UserError(
            f"--config.reward.overlong_cache_length {cache}: must be between 1 and"
            f" --config.training.max_completion_length, which is {longest}"
        )

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [max(-1.0, min(0.0, (longest - cache - len(ids)) / cache)) for ids in completion_ids]

    return reward


REWARDS: dict[str, Callable[[RewardContext], RewardFunction]] = {
    "accuracy": accuracy,
    "format": format_,
    "overlong": overlong,
}


def build_rewards(names: Sequence[str], context: RewardContext) -> list[RewardFunction]:
    """The reward functions that `names` lists: keys of REWARDS, or `path/to/file.py:function` of the user's own with
    the same signature. TRL logs each under its `__name__`."""
    check_rewards(names)
    functions = []
    for name in names:
        if _is_file(name):
            functions.append(_load(name))
            continue
        function = REWARDS[name](context)
        function.__name__ = name
        functions.append(function)
    return functions


def check_rewards(names: Sequence[str]) -> None:
    """Raise a UserError unless every name can be built."""
    if not names:
        raise UserError(f"{FLAG}: no reward; known: {', '.join(REWARDS)}, or path/to/file.py:function")
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{FLAG}: {name!r} stands there {count} times; give it a larger weight instead")
        if _is_file(name):
            _load(name)
        else:
            lookup(REWARDS, name, "reward", FLAG)


def grade_rows(grader: Grader, texts: Sequence[str], golds: Sequence[str], tasks: Sequence[str]) -> list[Grade]:
    """Grade rows that may belong to different tasks, in order."""
    grades: dict[int, Grade] = {}
    for name in dict.fromkeys(tasks):
        rows = [i for i, task in enumerate(tasks) if task == name]
        rubric = lookup(TASKS, name, "task").rubric
        grades |= zip(rows, grader.grade(rubric, [texts[i] for i in rows], [golds[i] for i in rows]), strict=True)
    return [grades[i] for i in range(len(texts))]


def _text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The generated text: TRL gives a list of messages where the prompt was one."""
    return completion if isinstance(completion, str) else (completion[-1]["content"] or "" if completion else "")


def _is_file(name: str) -> bool:
    return ".py:" in name or name.endswith(".py")


@functools.cache  # checked before the model is loaded, built after: run once
def _load(name: str) -> RewardFunction:
    path, _, function = name.rpartition(".py:")
    file = Path(f"{path}.py").expanduser()
    if not path or not function:
        raise UserError(f"{FLAG}: {name}: write path/to/file.py:function")
    if not file.is_file():
        raise UserError(f"{FLAG}: {name}: no such file {file}")
    loader = SourceFileLoader(f"perl_user_reward_{file.stem}", str(file))
    module = ModuleType(loader.name)
    module.__file__ = str(file)
    try:
        loader.exec_module(module)
    except Exception as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{FLAG}: {file}{line} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        defined = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
        wrong = "is no function" if found is not None else "is not defined there"
        raise UserError(f"{FLAG}: {name}: {function!r} {wrong}; functions there: {defined}")
    _check_signature(name, found)
    return found


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    """Raise a UserError for a function that could not be called as rewards are, with lists by keyword."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin that does not tell
        return
    call = function.__name__ if hasattr(function, "__name__") else "it"
    if {"solution_str", "ground_truth"} <= parameters.keys():
        raise UserError(
            f"{FLAG}: {name} is a reward of verl's form, for one text; write next to it and name instead: def"
            f" reward(completions, gold, task, **others): return [{call}(t, c[0]['content'], g) for c, g, t in"
            " zip(completions, gold, task)]"
        )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise UserError(f"{FLAG}: {name}: {call} must take **others too; TRL gives more than {', '.join(parameters)}")
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind in by_name]
    if unknown := [n for n in needed if n not in GIVEN]:
        raise UserError(
            f"{FLAG}: {name}: nothing is given to {call} as {', '.join(unknown)}; a reward gets lists, by keyword, of"
            f" {', '.join(GIVEN[:5])}"
        )
