"""math-verify outside of the main thread, where an environment's calls run.

Its timeout is an alarm, which Python gives to the main thread alone, so that parse and verify raise in another one.
There, what it would have bounded is done by the process that grades (perl.grading.verifier), which is killed when it is
late: a power of powers would hold this process's lock.
"""

from __future__ import annotations

import functools
import importlib
import marshal
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import CellType, FunctionType
from typing import Any

from perl.grading.verifier import MathVerifier, Question

Bound = Callable[[Callable[..., Any]], Callable[..., Any]]


def bound_in_threads() -> None:
    """From here on parse and verify may be called in any thread, whoever has imported them."""
    from math_verify import grader, parser

    parser.timeout = grader.timeout = _timeout  # pyright: ignore[reportPrivateImportUsage]


def _timeout(timeout_seconds: int | None = 10) -> Bound:
    """In the place of math_verify.utils.timeout."""
    from math_verify.utils import timeout

    alarm: Bound = timeout(timeout_seconds)
    if timeout_seconds is None or timeout_seconds <= 0:
        return alarm

    def bound(function: Callable[..., Any]) -> Callable[..., Any]:
        alarmed = alarm(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                return alarmed(*args, **kwargs)
            return _call_apart(function, args, kwargs, timeout_seconds)

        return call

    return bound


def _call_apart(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> Any:
    from math_verify.errors import TimeoutException

    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    made = function.__module__, marshal.dumps(function.__code__), function.__defaults__, closed
    thread, verifier = _verifier(seconds)
    question = Question(_packed((made, args, kwargs)), "", "call")
    verdict = thread.submit(verifier.verify, [question]).result()[0]
    if verdict.reason == "timeout":
        raise TimeoutException("Operation timed out!")
    if verdict.extracted is None:
        raise ValueError("the process that grades has ended")
    result = _unpacked(verdict.extracted)
    if verdict.reason == "error":
        raise result
    return result


@functools.cache
def _verifier(seconds: float) -> tuple[ThreadPoolExecutor, MathVerifier]:
    """And the thread that asks it: the kernel ends a worker with the thread that has started it."""
    return ThreadPoolExecutor(1, thread_name_prefix="math-verify"), MathVerifier(seconds)


def judge_call(text: str, _: str) -> tuple[float, str | None, str]:
    """(0, what the call gives or raises, "correct" or "error"), in the process that grades."""
    (module, code, defaults, closed), args, kwargs = _unpacked(text)
    cells = tuple(map(CellType, closed))
    names = vars(importlib.import_module(module))
    function = FunctionType(marshal.loads(code), names, argdefs=defaults, closure=cells)
    try:
        return 0.0, _packed(function(*args, **kwargs)), "correct"
    except Exception as error:  # noqa: BLE001  # it is raised again where it was called
        return 0.0, _packed(ValueError(f"{type(error).__name__}: {error}")), "error"


def _packed(what: Any) -> str:
    return pickle.dumps(what).hex()


def _unpacked(text: str) -> Any:
    import sympy

    with sympy.evaluate(False):  # an expression is made again as it was, not calculated
        return pickle.loads(bytes.fromhex(text))
