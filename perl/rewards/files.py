"""Rewards of the user's own, `path/to/file.py:function`: in TRL's form, or in one of verl's two.

    def reward(completions, completion_ids, gold, task, **others)                   TRL: lists, by keyword
    def compute_score(data_source, solution_str, ground_truth, extra_info=None)     verl: one completion
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos)      verl's batch reward manager

Which of them a function is, its parameters say, before a model is loaded. Each becomes what TRL calls, and whatever it
does wrong is one line that names the file, the function and the row. A number that is not finite becomes NOT_FINITE,
which the trainer looks for: common.on_nonfinite says what then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import math
import numbers
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from perl import device
from perl.base.errors import RankError, UserError
from perl.base.paths import user_path
from perl.base.provenance import text_hash
from perl.records import Problem

log = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
Texts = Sequence[str | Sequence[dict[str, Any]]]
FLAG = "--config.reward.functions"
KWARGS_FLAG = "--config.reward.kwargs"
ROW = "row"
"""Column of `row_of`."""
NOT_FINITE = math.inf
"""In the place of a reward that is NaN or infinite: NaN is TRL's for a row without a reward."""
RAISED = (Exception, SystemExit)
"""What a function of the user's, or its file, may raise: sys.exit() in it would end the run as if it were done."""
SHOWN = 40
"""Characters of a prompt or a completion in an error."""
GIVEN = ("completions", "completion_ids", "prompts", "gold", "task", "trainer_state", "log_extra", "log_metric", ROW)
"""What TRL calls a reward with: our data set's columns and TRL's own."""
OF_ENVIRONMENTS = ("environments", "environment_rewards", "completion_lengths")
"""And in a run with tools or an environment."""
SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def is_file(name: str) -> bool:
    """Whether a name in reward.functions is one of the user's own."""
    return ".py:" in name or name.endswith(".py")


def row_of(problem: Problem) -> str:
    """What verl's rewards are given of a row, as JSON: Arrow would make one type of all rows' extra_info."""
    row = {
        "where": problem.source,
        "data_source": problem.data_source,
        "ground_truth": problem.ground_truth,
        "extra_info": problem.extra_info,
        **({"columns": problem.columns} if problem.columns else {}),
    }
    return json.dumps(row, ensure_ascii=False, default=lambda v: float(v) if isinstance(v, Decimal) else str(v))


def text_of(completion: str | Sequence[dict[str, Any]]) -> str:
    """The generated text: TRL gives a list of messages where the prompt was one."""
    return completion if isinstance(completion, str) else (completion[-1]["content"] or "" if completion else "")


def in_verls_form(function: Callable[..., Any]) -> bool:
    """Whether it takes verl's arguments, or what is wrapped around one that does."""
    with contextlib.suppress(TypeError, ValueError):
        return not {SINGLE[1], BATCH[1]}.isdisjoint(inspect.signature(function).parameters)
    return False


def row_name(place: int, completion: Any, prompt: Any = None, row: str | None = None) -> str:
    """How an error names a completion: where its row stands, how its prompt and itself begin.

    Args:
        place: of the completion among those of this call.
        completion, prompt: a text, or messages.
        row: what `row_of` gave.
    """
    where = json.loads(row)["where"] if row else f"completion {place}"
    asked = "" if prompt is None else f"prompt {_beginning(text_of(prompt))!r}, "
    return f"{where} ({asked}completion {_beginning(text_of(completion))!r})"


def _beginning(text: Any) -> str:
    if isinstance(text, list):  # of a row with images: the texts among its parts
        text = " ".join(part["text"] for part in text if part.get("type") == "text")
    words = " ".join(str(text)[: 4 * SHOWN].split())
    return words if len(words) <= SHOWN else words[:SHOWN] + "…"


def load_reward(name: str, kwargs: Mapping[str, Any], of_environments: Sequence[str] = ()) -> RewardFunction:
    """The function that TRL calls for `name`.

    Args:
        name: path/to/file.py:function.
        kwargs: further keyword arguments of a function in verl's form (its reward_kwargs).
        of_environments: which of OF_ENVIRONMENTS it is given too.

    Raises:
        UserError: there is no such function, or it could not be called.
    """
    function = import_named(name)
    if inspect.isclass(function):
        raise UserError(f"{FLAG}: {name}: is a class, which TRL would make an instance of; name an instance of it")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin that does not tell
        parameters = {}
    for form, reward in ((SINGLE, _of_one), (BATCH, _of_batch)):
        if form[1] in parameters or form[2] in parameters:
            taken = _check_verls(name, function, parameters, form, kwargs)
            return _over(function, reward(name, function, taken, kwargs))
    if parameters:
        _check_trls(name, function, parameters, (*GIVEN, *of_environments))
    return _over(function, _of_trl(name, function))


def _over(function: RewardFunction, called: RewardFunction) -> RewardFunction:
    """`called`, from which inspect.unwrap finds the user's own function: an audit reads its code."""
    called.__wrapped__ = function  # type: ignore[attr-defined]
    return called


# ----------------------------------------------------------------------------------------------------- what TRL calls


def _of_one(name: str, function: RewardFunction, taken: Sequence[str], kwargs: Mapping[str, Any]) -> RewardFunction:
    def reward(
        completions: Texts, row: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float]:
        results, where = [], _row_names(completions, {ROW: row, **columns})
        for place, given in enumerate(_verls(completions, row, **columns)):
            with _explained(name, function, lambda place=place: where(place)):
                results.append(function(**({key: given[key] for key in taken} | dict(kwargs))))
        return _scores(name, results, where, log_metric)

    return reward


def _of_batch(name: str, function: RewardFunction, taken: Sequence[str], kwargs: Mapping[str, Any]) -> RewardFunction:
    def reward(
        completions: Texts, row: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float]:
        where, facts = _row_names(completions, {ROW: row, **columns}), _verls(completions, row, **columns)
        given = {plural: [one.get(single) for one in facts] for single, plural in zip(SINGLE, BATCH, strict=True)}
        with _explained(name, function, lambda: _any_of(completions, where)):
            results = _as_list(name, function(**({key: given[key] for key in taken} | dict(kwargs))), len(completions))
        return _scores(name, results, where, log_metric)

    return reward


def _verls(
    completions: Texts,
    row: Sequence[str],
    responses: Sequence[str] | None = None,
    turns: Sequence[int] | None = None,
    **_: Any,
) -> list[dict[str, Any]]:
    """SINGLE of each row. Of a conversation verl's response is all behind the prompt, and num_turns counts the prompt,
    the policy's turns and what it was shown between them."""
    facts = [json.loads(text) for text in row]
    for one, completion in zip(facts, completions, strict=True):
        one["solution_str"] = text_of(completion)
    for one, response, number in zip(facts, responses or (), turns or (), strict=False):
        one["solution_str"] = response
        one["extra_info"] = {**(one.get("extra_info") or {}), "num_turns": 2 * number}
    return facts


def _of_trl(name: str, function: RewardFunction) -> RewardFunction:
    """None is TRL's own way to say that a row has no reward of this function."""

    def check(rewards: Sequence[Any], where: Callable[[int], str]) -> list[Any]:
        scores = enumerate(rewards)
        return [None if score is None else _number(name, score, where, place) for place, score in scores]

    def reward(completions: Texts, **columns: Any) -> list[Any]:
        where = _row_names(completions, columns)
        with _explained(name, function, lambda: _any_of(completions, where)):
            rewards = _as_list(name, function(completions=completions, **columns), len(completions))
        return check(rewards, where)

    async def asynchronous(completions: Texts, **columns: Any) -> list[Any]:
        where = _row_names(completions, columns)
        with _explained(name, function, lambda: _any_of(completions, where)):
            rewards = _as_list(name, await function(completions=completions, **columns), len(completions))
        return check(rewards, where)

    return asynchronous if inspect.iscoroutinefunction(function) else reward


def _row_names(completions: Texts, columns: Mapping[str, Any]) -> Callable[[int], str]:
    """`row_name` of a place."""
    prompts, rows = columns.get("prompts"), columns.get(ROW)
    return lambda place: row_name(place, completions[place], prompts and prompts[place], rows and rows[place])


def _any_of(completions: Texts, where: Callable[[int], str]) -> str:
    """The row that a function of lists raised on, where there is one alone."""
    return f"one of {len(completions)} completions" if len(completions) > 1 else where(0)


def _scores(
    name: str,
    results: Sequence[Any],
    where: Callable[[int], str],
    log_metric: Callable[[str, float], None] | None,
) -> list[float]:
    """One float a result, which is a number or a dict with "score"; the dict's other numbers are logged, as means."""
    scores: list[float] = []
    others: dict[str, list[float]] = defaultdict(list)
    for place, result in enumerate(results):
        if not isinstance(result, Mapping):
            scores.append(_number(name, result, where, place))
            continue
        if "score" not in result:
            raise RankError(
                f"{FLAG}: {name}: on {where(place)} it gave a dict without score, of {', '.join(map(str, result))}"
            )
        scores.append(_number(name, result["score"], where, place))
        for key, value in result.items():
            if key != "score" and (number := _finite(value)) is not None:
                others[str(key)].append(number)
    if log_metric is not None:
        for key, values in others.items():
            log_metric(f"rewards/{name.rpartition(':')[2]}/{key}", sum(values) / len(values))
    return scores


def _finite(value: Any) -> float | None:
    """A number, numpy's too, as a float; None for anything else, and for one that is not finite."""
    try:
        number = float(value) if isinstance(value, numbers.Real | Decimal | np.bool_) else math.nan
    except (ValueError, OverflowError):  # Decimal's sNaN, and an integer that no float holds
        number = math.nan
    return number if math.isfinite(number) else None


def _as_list(name: str, rewards: Any, length: int) -> list[Any]:
    """Inside `_explained`: a generator runs the user's code here."""
    try:
        items = iter(rewards)
    except TypeError:  # a number, or None
        items = None
    if items is None or isinstance(rewards, str | Mapping):
        raise RankError(f"{FLAG}: {name}: it gave {rewards!r:.60}, not a list of {length} numbers")
    scores = list(items)
    if len(scores) != length:
        raise RankError(f"{FLAG}: {name}: it gave {len(scores)} rewards for {length} completions")
    return scores


def _number(name: str, score: Any, where: Callable[[int], str], place: int) -> float:
    try:
        number = None if isinstance(score, str) else float(score)
    except (TypeError, ValueError):
        number = None
    except OverflowError:  # an integer that no float holds
        number = math.inf
    if number is None:
        raise RankError(
            f"{FLAG}: {name}: on {where(place)} it gave {score!r:.60}, which is no number; write 0.0 or another"
        )
    return number if math.isfinite(number) else NOT_FINITE


@contextlib.contextmanager
def _explained(name: str, function: RewardFunction, where: Callable[[], str]) -> Iterator[None]:
    """RankError for what a function raises inside, with the last line of its file that ran and the row. What explains
    itself stays: another UserError, or memory that ran out (perl.runs.out_of_memory)."""
    try:
        yield
    except RAISED as error:
        if isinstance(error, UserError) or device.is_out_of_memory(error):
            raise
        log.debug("what %s raised", name, exc_info=error)  # --config.common.debug true shows it
        file, frames = name.rpartition(":")[0], traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(file).name]
        line = f":{lines[-1]}" if lines else ""
        raise RankError(
            f"{FLAG}: {file}{line}: {_name(function)} raised {type(error).__name__} on {where()}: {error}"
        ) from error


# ----------------------------------------------------------------------------------------------- import and signature


@functools.cache  # checked before the model is loaded, built after: run once
def import_named(name: str, flag: str = FLAG, what: str = "function") -> Callable[..., Any]:
    """What `path/to/file.py:name` names, the file being run once. A UserError names `flag` where there is none.

    Args:
        what: the user should have named.
    """
    path, _, function = name.rpartition(".py:")
    file = user_path(f"{path}.py")
    if not path or not function:
        raise UserError(f"{flag}: {name}: write path/to/file.py:{what}")
    if not file.is_file():
        raise UserError(f"{flag}: {name}: no such file {file}")
    unique = text_hash(str(file.absolute()))[:8]  # files in two folders may have one name
    loader = SourceFileLoader(f"perl_user_{file.stem}_{unique}", str(file))
    module = ModuleType(loader.name)
    module.__file__ = str(file)
    sys.modules[loader.name] = module  # where dataclasses, and whatever reads annotations, look for it
    try:
        loader.exec_module(module)
    except RAISED as error:
        del sys.modules[loader.name]
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{flag}: {file}{line} cannot be imported: {type(error).__name__}: {error}") from error
    reward = getattr(module, function, None)
    if not callable(reward):
        defined = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
        wrong = f"is no {what}" if reward is not None else "is not defined there"
        raise UserError(f"{flag}: {name}: {function!r} {wrong}; functions there: {defined}")
    return reward


def _check_verls(
    name: str,
    function: RewardFunction,
    parameters: Mapping[str, inspect.Parameter],
    form: Sequence[str],
    kwargs: Mapping[str, Any],
) -> list[str]:
    """Those of `form` that the function takes; a UserError where it could not be called with them."""
    call = _name(function)
    supported = f"supported is def {call}({', '.join(form)})"
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{FLAG}: {name}: {call} is async; {supported}, a plain function")
    nameless = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind in _BY_NAME]
    if unknown := [*nameless, *(n for n in needed if n not in form and n not in kwargs)]:
        raise UserError(
            f"{FLAG}: {name}: nothing is given to {call} as {', '.join(unknown)}; {supported}, by name, and"
            f" {KWARGS_FLAG} gives more"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if extra := [key for key in kwargs if key not in parameters and not takes_all]:
        raise UserError(f"{KWARGS_FLAG}: {name} takes no {', '.join(extra)}; it takes {', '.join(parameters)}")
    return [key for key in form if takes_all or key in parameters]


def _check_trls(
    name: str, function: RewardFunction, parameters: Mapping[str, inspect.Parameter], given: Sequence[str]
) -> None:
    """Raise a UserError for a function that could not be called as TRL calls rewards, with lists by keyword."""
    call = _name(function)
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind in _BY_NAME]
    if unknown := [n for n in needed if n not in given]:
        if unknown[0] in OF_ENVIRONMENTS and set(given) & {*OF_ENVIRONMENTS}:
            raise UserError(
                f"{FLAG}: {name}: nothing is given to {call} as {unknown[0]} where rollout.workers have them; write"
                " --config.rollout.workers 0, or use environment_rewards, which get_reward gives"
            )
        if unknown[0] in OF_ENVIRONMENTS:
            raise UserError(
                f"{FLAG}: {name}: nothing is given to {call} as {unknown[0]} but of conversations, in a training with"
                " --config.environment.tools or --config.environment.factory"
            )
        raise UserError(
            f"{FLAG}: {name}: nothing is given to {call} as {', '.join(unknown)}; a reward gets lists, by keyword, of"
            f" {', '.join(GIVEN[:5])}, or in verl's form {', '.join(SINGLE)}"
        )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise UserError(f"{FLAG}: {name}: {call} must take **others too; TRL gives more than {', '.join(parameters)}")


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", "it")
