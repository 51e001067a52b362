"""Tools, and TRL's environment classes, as an Environment: what environment.tools and environment.factory name.

tools     functions with type hints and a docstring, TRL's `tools`
factory   a class of TRL's `environment_factory`: reset(**row) -> text behind the last message or None, each further
          public method is a tool, get_reward() where it has an opinion; or an Environment: reset(row), step(message)

One of TRL's classes is constructed as often as conversations go on at once, and reset for each.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from typing import Any, Literal

from perl.base.errors import RankError, UserError, lookup
from perl.config.schema import EnvironmentConfig
from perl.environments.base import Environment
from perl.environments.calls import PARSER_FLAG, Call
from perl.environments.waiting import Waiting
from perl.grading.threads import bound_in_threads
from perl.records import Message
from perl.rewards.files import RAISED, ROW, import_named, is_file

TOOLS_FLAG = "--config.environment.tools"
FACTORY_FLAG = "--config.environment.factory"

MOST_AT_ONCE = 64
"""Calls of environments, each in a thread."""
MOST_CALLS = 16
"""Of a turn: a policy may write hundreds."""

Function = Callable[..., Any]
Result = tuple[Message, bool]
"""Of a call, and whether it is an error."""


class _Python:
    """The sandbox, which is started when it is opened, and the function that models see."""

    def __init__(self, config: EnvironmentConfig, name: str = "python"):
        self.config, self.name = config, name

    def __enter__(self) -> None:
        from perl.environments.python_tool import PythonTool
        from perl.environments.sandbox import Limits

        seconds = min(Limits.timeout_s, self.config.tool_timeout_s / 2)
        self.run = PythonTool(Limits(timeout_s=seconds), required=self.config.sandbox)

    def __exit__(self, *_: Any) -> None:
        self.run.close()

    def function(self) -> Function:
        def python(code: str) -> str:
            """Run Python code and return what it prints. Each call starts anew.

            Args:
                code: The code.
            """
            return self.run(code)

        python.__name__ = self.name
        return python


TOOLS: dict[str, Callable[[EnvironmentConfig], Any]] = {
    "python": _Python,
    "code_interpreter": functools.partial(_Python, name="code_interpreter"),
}
"""name -> what holds the tool, given the group `environment`: its `function` may be called inside `with`. verl's recipe
calls it code_interpreter, and so do the models that it has trained."""


@dataclass(slots=True, kw_only=True)
class EnvironmentSource:
    """Where a run's environments come from; open inside `with`."""

    make: Callable[[], Environment]
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """Of the tools, for the chat template."""
    role: Literal["tool", "user"] = "tool"
    """Of what the policy is shown."""
    rewards: bool = False
    """They have a get_reward."""
    needed: Sequence[str] = ()
    """Columns that reset can't do without."""
    resources: Sequence[contextlib.AbstractContextManager[Any]] = ()
    instances: list[Any] = field(default_factory=list)
    """Environments that are made, and free."""

    @property
    def at_once(self) -> int:
        """Calls that may be under way: more of the sandbox's would wait for each other, and their deadline run."""
        from perl.environments.python_tool import slots

        return slots() if self.resources else MOST_AT_ONCE

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self.resources:
                stack.enter_context(each)
            yield

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise a UserError for a row that lacks what reset needs."""
        for row in rows if self.needed else ():
            if missing := [name for name in self.needed if name not in columns_of(row)]:
                given = ", ".join(columns_of(row))
                raise UserError(
                    f"{FACTORY_FLAG}: nothing is given to reset as {missing[0]} for {json.loads(row[ROW])['where']}; it"
                    f" gets {given}, by name"
                )


def load_environment(config: EnvironmentConfig) -> EnvironmentSource:
    """What the group `environment` names. A UserError for what can't be used so."""
    if any(map(is_file, (*config.tools, config.factory or ""))):
        bound_in_threads()
    functions: dict[str, Function] = {}
    resources = []
    for name in config.tools:
        if is_file(name):
            function = import_named(name, TOOLS_FLAG)
            if not hasattr(function, "__name__"):
                raise UserError(
                    f"{TOOLS_FLAG}: {name}: a {type(function).__name__} has no name that a model could call; write a"
                    " def around it"
                )
        else:
            resources.append(held := lookup(TOOLS, name, "tool", TOOLS_FLAG)(config))
            function = held.function()
        if function.__name__ in functions:
            raise UserError(f"{TOOLS_FLAG}: two tools are called {function.__name__}; give one another name")
        functions[function.__name__] = function
    if config.tool_call_parser == "python_fence" and (config.factory is not None or [*functions] != ["python"]):
        raise UserError(
            f"{PARSER_FLAG} python_fence: blocks of code are calls of the tool python, and nothing else can be called;"
            f" write {TOOLS_FLAG} '[\"python\"]' alone, or leave it out"
        )
    schemas = [_schema(function, TOOLS_FLAG) for function in functions.values()]
    if config.factory is None:
        return EnvironmentSource(make=lambda: ToolUse(functions), schemas=schemas, resources=resources)
    factory = import_named(config.factory, FACTORY_FLAG, "class")
    first = _made(factory, config.factory)
    if _is_environment(first):
        if functions:
            raise UserError(f"{TOOLS_FLAG}: {config.factory} has a step of its own, which answers; leave tools out")
        for name in ("reset", "step", "get_reward"):
            if inspect.iscoroutinefunction(getattr(first, name, None)):
                raise UserError(f"{FACTORY_FLAG}: {config.factory}: {name} is async; write a plain def")
        return EnvironmentSource(make=factory, role="user", rewards=_has(first, "get_reward"), instances=[first])
    if not _has(first, "reset"):
        raise UserError(f"{FACTORY_FLAG}: {config.factory} has no reset; write def reset(self, **row): ...")
    methods = methods_of(first)
    if both := [name for name in methods if name in functions]:
        raise UserError(f"{FACTORY_FLAG}: {config.factory} and {TOOLS_FLAG} both have a tool {both[0]}; rename one")
    schemas += [_schema(method, f"{FACTORY_FLAG} {config.factory}") for method in methods.values()]
    if not schemas:
        raise UserError(f"{FACTORY_FLAG}: {config.factory} has no public method, which would be a tool")
    return EnvironmentSource(
        make=lambda: ToolUse(functions, factory()),
        schemas=schemas,
        rewards=_has(first, "get_reward"),
        needed=_needed(first.reset),
        resources=resources,
        instances=[ToolUse(functions, first)],
    )


class ToolUse:
    """An Environment of tools: a turn's calls are made one after the other, those that are async go on together; each
    result is a message of role tool, in the order of the calls; a turn without one is the answer. What a tool raises is
    told to the model, as TRL does: {"error": …}, but for a RankError, which ends the run.

    Args:
        tools: by name.
        instance: of one of TRL's classes, whose methods are tools besides.
    """

    def __init__(self, tools: Mapping[str, Function], instance: Any = None):
        self.instance = instance
        self.tools = {**tools, **({} if instance is None else methods_of(instance))}
        self._turns: list[dict[int, Result]] = []
        """Of each turn's calls, by their places."""
        self._begun: Message | None = None
        """The turn whose results are the last ones."""
        self._left: list[Message] = []
        """Turns that took too long: their threads make no further calls."""
        self._lock = threading.Lock()
        self.waiting = Waiting()

    @property
    def outcomes(self) -> list[bool]:
        """Of each call since reset: it has failed."""
        return [turn[place][1] for turn in self._turns for place in sorted(turn)]

    def reset(self, row: dict[str, Any]) -> list[Message]:
        self._turns, self._begun, self._left = [], None, []
        prompt = list(row["prompt"])
        if self.instance is None:
            return prompt
        parameters = inspect.signature(self.instance.reset).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        columns = {name: value for name, value in columns_of(row).items() if takes_all or name in parameters}
        observation = self.waiting.result(lambda: self.instance.reset(**columns))
        if observation is None:
            return prompt
        if not isinstance(observation, str):
            raise TypeError(f"reset gave {observation!r:.60}, which is no text")
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]

    def step(self, message: Message) -> list[Message] | None:
        calls, left = message.get("tool_calls", []), self._left
        made: dict[int, Result] = _too_many(calls)
        with self._lock:
            if not calls or _is_in(left, message):
                return None
            self._turns.append(made)
            self._begun = message
        places: dict[Future[Any], int] = {}

        def in_time() -> bool:
            with self._lock:
                return not _is_in(left, message)

        def came(future: Future[Any]) -> bool:
            """In time."""
            place = places[future]
            result = _result(calls[place], future)
            with self._lock:
                if not _is_in(left, message):
                    made[place] = result
                return place in made

        for place, call in enumerate(calls[:MOST_CALLS]):
            places[future := self.waiting.begun(functools.partial(self._call, call))] = place
            if not (came(future) if future.done() else in_time()):
                future.cancel()  # begun behind the cancellation of the others
                return None
        under_way = [future for future, place in places.items() if place not in made]
        return _messages(made) if all(map(came, as_completed(under_way))) else None

    def timed_out(self, message: Message, seconds: float) -> list[Message] | None:
        """In the place of what `step`, which may not even have begun, has not given for so long; None: an instance that
        is still at it answers no more."""
        with self._lock:
            self._left.append(message)
            if self.instance is not None:
                return None
            made = self._turns.pop() if self._begun is message else {}
        calls, error = message.get("tool_calls", []), {"error": f"no answer within {seconds:g} s"}
        late = {place: (_message(call, error), True) for place, call in enumerate(calls[:MOST_CALLS])}
        self._turns.append(late | _too_many(calls) | made)
        return _messages(self._turns[-1]) or None

    def get_reward(self) -> float | None:
        return self.waiting.result(self.instance.get_reward)

    def _call(self, call: Call) -> Any:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if "error" in call:
            raise ValueError(call["error"])
        if name not in self.tools:
            raise ValueError(f"Tool {name} not found.")
        return self.tools[name](**copy.deepcopy(arguments))  # rewards, and samples.jsonl, have them as they were drawn


def _result(call: Call, future: Future[Any]) -> Result:
    try:
        return _message(call, future.result()), False
    except RankError:  # the sandbox can't be had any more
        raise
    except RAISED as error:
        return _message(call, {"error": str(error)}), True


def _too_many(calls: Sequence[Call]) -> dict[int, Result]:
    """One answer to all calls that are not made."""
    if len(calls) <= MOST_CALLS:
        return {}
    error = {"error": f"{MOST_CALLS} calls of a turn are made, {len(calls) - MOST_CALLS} further ones are not"}
    return {MOST_CALLS: (_message(calls[MOST_CALLS], error), True)}


def _messages(made: Mapping[int, Result]) -> list[Message]:
    return [made[place][0] for place in sorted(made)]


def _is_in(messages: Sequence[Message], message: Message) -> bool:
    return any(each is message for each in messages)


def _message(call: Call, result: Any) -> Message:
    return {"role": "tool", "name": call["function"]["name"], "content": str(result)}


def methods_of(instance: Any) -> dict[str, Function]:
    """The tools that TRL sees in an environment, by the names that their schemas have."""
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    tools = [name for name in names if not name.startswith("_") and name not in ("reset", "get_reward")]
    return {method.__name__: method for method in (getattr(instance, name) for name in tools)}


def columns_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What TRL's reset gets of a row: its columns, and those of verl's extra_info."""
    facts = json.loads(row[ROW]) if ROW in row else {}
    further = {name: facts[name] for name in ("data_source", "ground_truth") if name in facts}
    return {**(facts.get("extra_info") or {}), **further, **facts.get("columns", {}), **row}


def _made(factory: Function, name: str) -> Any:
    try:
        return factory()
    except RAISED as error:
        raise UserError(f"{FACTORY_FLAG}: {name}() raised {type(error).__name__}: {error}") from error


def _is_environment(instance: Any) -> bool:
    """Of our own form: reset(row) and step(message). A step that takes a text is a tool of TRL's."""
    step, reset = getattr(instance, "step", None), getattr(instance, "reset", None)
    if not (callable(step) and callable(reset)):
        return False
    message, row = (next(iter(inspect.signature(each).parameters.values()), None) for each in (step, reset))
    return (
        message is not None
        and message.name == "message"
        and message.annotation not in (str, "str")
        and row is not None
        and (row.name, row.kind) == ("row", row.POSITIONAL_OR_KEYWORD)
    )


def _has(instance: Any, method: str) -> bool:
    return callable(getattr(instance, method, None))


def _needed(reset: Function) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(reset).parameters.items()
    return [name for name, each in parameters if each.default is each.empty and each.kind in kinds]


def _schema(function: Function, flag: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except RAISED as error:  # it evaluates hints, and reads choices as JSON
        raise UserError(
            f"{flag}: {function.__name__}: {' '.join(str(error).split())}; a tool has a type hint and, under Args: of"
            " its docstring, a line for each argument"
        ) from error
