"""The process that runs math-verify: `python -m perl.grading.worker FD PARENT [entries]`, started by
`verifier.MathVerifier`.

It imports math-verify, with `entries` reasoning-gym too, and then forks whenever it is sent a socket over FD; the fork
reads lists of Questions from that socket and answers each as soon as it is judged. Nothing here bounds the time of a
row (`9^{9^{9^{9}}}` keeps the interpreter inside one C call, where no signal handler runs): the parent kills the fork
when an answer is late, and the kernel kills both when the parent dies.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from perl.grading import stated
from perl.grading.entries import import_generators, judge_entry
from perl.grading.threads import judge_call

MEMORY_LIMIT = 4 << 30
"""Bytes of address space: an answer may write a number that no machine can hold."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _limit_memory()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    control = Connection(int(sys.argv[1]))
    read_integers_directly()
    judge("\\boxed{\\frac{1}{2}}", "0.5")  # builds the parser's tables before the first deadline runs,
    judge("\\boxed{\\sqrt{12}/2 + 1}", "1 + \\sqrt{3}")  # and loads what algebra needs, which takes half a second
    if "entries" in sys.argv:
        import_generators()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # sympy makes many small objects, few of them in cycles
    control.send("ready")
    worker, fork = os.getpid(), 0
    while True:
        try:
            handle = recv_handle(control)
        except (EOFError, OSError):
            return
        if fork:
            os.waitpid(fork, 0)  # it was killed, or has crashed
        fork = os.fork()
        if fork == 0:
            _die_with_parent(worker)
            control.close()
            _serve(Connection(handle))
            return
        os.close(handle)
        control.send(fork)


def _serve(connection: Connection) -> None:
    while True:
        try:
            rows = connection.recv()
        except EOFError:
            return
        for text, gold, how in rows:
            connection.send(JUDGES[how](text, gold))


def judge(text: str, gold: str) -> tuple[float, str | None, str]:
    """(score, extracted answer, reason) of math-verify with its default extraction: LaTeX, then plain expressions."""
    from math_verify import parse

    answer = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # None: the parent's deadline
    if not answer:
        return 0.0, None, "unextracted"
    correct = _verify(_parse_gold(gold), answer)
    return float(correct), _printed(answer), "correct" if correct else "wrong"


def judge_parts(answer: str, gold: str) -> tuple[float, str | None, str]:
    """(score, None, reason) of an answer that stated.extract found: whether its parts are the gold's, math-verify
    deciding on plain expressions. What was extracted is known to the parent."""
    correct = stated.equal(gold, answer, _same)
    return float(correct), None, "correct" if correct else "wrong"


JUDGES = {"text": judge, "parts": judge_parts, "entry": judge_entry, "call": judge_call}


def _same(gold: str, answer: str) -> bool:
    from math_verify import parse

    read = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return bool(read) and _verify(_parse_gold(gold), read)


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    """math-verify's verdict; of two numbers also that they agree to 50 digits of their own size. It alone takes 2^-98
    for 2^-97, and for its negative, since their difference rounds to zero."""
    from math_verify import verify

    if not verify(gold, answer, timeout_seconds=None):
        return False
    if any(g == a for g in gold for a in answer):
        return True
    pairs = [(g, a) for g in gold for a in answer if _is_constant(g) and _is_constant(a)]
    return not pairs or any(_agree(g, a) for g, a in pairs)


def _is_constant(expression: Any) -> bool:
    import sympy

    return isinstance(expression, sympy.Expr) and bool(expression.is_number) and bool(expression.is_finite)


def _agree(gold: Any, answer: Any) -> bool:
    import sympy

    one, other = (
        expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})
        for expression in (gold, answer)
    )
    if one == other or (one.is_Rational and other.is_Rational):
        return one == other
    difference, size = (sympy.Abs(sympy.N(value, 20, maxn=120)) for value in (one - other, one))
    return bool(difference <= size * sympy.Float(10) ** -50)


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    """Golds repeat (n completions of a problem), so each is parsed once."""
    from math_verify import parse

    return parse(gold if "\\boxed" in gold else f"\\boxed{{{gold}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _printed(answer: list[Any]) -> str:
    """The answer as it was written; math-verify appends that text to the parsed expression."""
    written = [item for item in answer if isinstance(item, str)]
    if written:
        return written[-1]
    try:
        return str(answer[0])
    except (ValueError, RecursionError):  # an integer of more digits than Python prints, or nesting too deep
        return "(too large to print)"


def read_integers_directly() -> None:
    """Spare math-verify its LaTeX grammar for integers, which most answers are: two milliseconds each there, and the
    same sympy.Integer comes out. Other expressions are remembered in a larger cache than its own 20 entries."""
    import sympy
    from math_verify import parser

    integer = re.compile(r"-?[0-9]{1,300}")
    grammar = functools.lru_cache(maxsize=4096)(parser.parse_latex_cached.__wrapped__)

    def parse_latex(latex: str) -> Any:
        return sympy.Integer(latex) if integer.fullmatch(latex) else grammar(latex)

    parser.parse_latex_cached = parse_latex  # pyright: ignore[reportAttributeAccessIssue]


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_LIMIT:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; without it, a row in progress would outlive a killed run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    main()
