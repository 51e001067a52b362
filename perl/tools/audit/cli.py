"""The command: which rows and which reward, and the table of what was found."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from perl.base.errors import UserError, lookup
from perl.grading import Grader
from perl.records import Problem
from perl.rewards.files import FLAG, KWARGS_FLAG, RewardFunction, is_file
from perl.rewards.functions import REWARDS, RewardContext, build_rewards, check_tasks
from perl.tasks import TASKS, load_problems, problem_of_row
from perl.tasks.reasoning_gym import TASK as GENERATED
from perl.tasks.reasoning_gym import generated_rows, is_generated
from perl.tools import sums
from perl.tools.audit.apart import told_apart
from perl.tools.audit.probes import PROBES
from perl.tools.audit.rows import ANSWER, Row, make_rows
from perl.tools.audit.verdict import Audit, Share, audit, unfinished

EXIT_FAULTY = 1
MOST_S = 86_400
"""A pipe is waited for in milliseconds of 31 bits."""
ROWS = 20
FURTHER = 10
"""Rows that are read besides, for wrong answers."""
COMPLETION = 4096
"""max_completion_length of the rewards that ask for it."""
CACHE = 1024
EXPECTED = {"pays": "paid", "less": "less", "told": ""}
"""What a text has to earn, beside what the right answer does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME|file.py:reward", help=f"one of {', '.join(REWARDS)}; a task ({', '.join(TASKS)}), for the"
        " accuracy by its rules; reasoning_gym:NAME; or a function of your own, in TRL's form or verl's",
    )  # fmt: skip
    parser.add_argument("--data", help="file, folder or data set whose rows are asked; default: sums made here")
    parser.add_argument("--split", help="of --data; default: as in an evaluation")
    parser.add_argument("--task", help="of the rows; default: as they say, of the sums gsm8k")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"most rows; default: {ROWS}")
    parser.add_argument(
        "--form", help=f"how the prompts ask for the answer, as '<answer>{ANSWER}</answer>'; default: as the task does"
    )
    parser.add_argument("--deadline_s", type=float, default=60.0, help="seconds that a call may take; default: 60")
    parser.add_argument("--kwargs", default="{}", help="JSON: what reward.kwargs gives a function in verl's form")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 where the reward is faulty."""
    name, task = args.name, args.task
    generated = is_generated(name)
    if generated and not (args.data or task or args.split):
        name, task = "accuracy", None
    elif generated:
        raise UserError(
            f"{name}: makes its own rows and says how they are graded; leave --data, --split and --task out"
        )
    elif name in TASKS:
        if task not in (None, name):
            raise UserError(f"--task {task}: {name} is a task itself; leave it out")
        name, task = "accuracy", name
    elif not is_file(name):
        lookup({**REWARDS, **TASKS}, name, "reward or task")
    if task is not None:
        lookup(TASKS, task, "task", "--task")
    if not 0 < args.deadline_s <= MOST_S:
        raise UserError(f"--deadline_s {args.deadline_s:g}: write a number above 0, at most {MOST_S}")
    if args.rows < 1:
        raise UserError(f"--rows {args.rows}: write a number from 1")
    if args.form is not None and ANSWER not in args.form:
        raise UserError(f"--form {args.form!r}: no place for the answer; write {ANSWER} where it stands")
    try:
        kwargs = json.loads(args.kwargs)
    except (ValueError, RecursionError):
        kwargs = None
    if not isinstance(kwargs, dict):
        raise UserError(f"--kwargs {args.kwargs}: write a JSON object, such as '{{\"scale\": 2}}'")
    if args.split is not None and args.data is None:
        raise UserError("--split is of --data; name that too")
    if generated:
        made = itertools.islice(generated_rows(args.name, None, None, audited=False), args.rows + FURTHER)
        problems = [problem_of_row(row, where, GENERATED) for row, where in made]
    elif args.data is None:
        problems = made_problems(task or "gsm8k", args.rows + FURTHER)
    else:
        graded = not is_file(name)
        problems = load_problems(args.data, split=args.split, limit=args.rows + FURTHER, task=task, graded=graded)
    rows = make_rows(problems, args.form, args.rows)
    if not rows:
        raise UserError(
            f"{args.data or args.name}: no row with an answer and another row with another answer beside it"
        )
    with Grader() as grader:
        context = RewardContext(
            grader=grader, max_completion_length=COMPLETION, overlong_cache_length=CACHE, kwargs=kwargs
        )
        try:
            functions = build_rewards([name], context)
        except UserError as error:  # in the words of a training's flags
            said = str(error).removeprefix(f"{FLAG}: ").replace(KWARGS_FLAG, "--kwargs")
            raise UserError(f"python -m perl audit: {said}") from error
        check_tasks([name], {row.columns["task"] for row in rows if row.columns["task"]})
        found = (
            audit_apart(args.name, functions[0], rows, args.deadline_s)
            if is_file(name)
            else audit(args.name, functions[0], rows)
        )
    if args.json:
        plain = json.loads(json.dumps(asdict(found)), parse_constant=lambda _: None)  # JSON has no NaN
        print(json.dumps(plain, ensure_ascii=False))
    else:
        show(found, Console())
    return EXIT_FAULTY if found.verdict == "faulty" else 0


def audit_apart(name: str, function: RewardFunction, rows: Sequence[Row], deadline_s: float) -> Audit:
    """The audit of a user's function, in a process of its own: where it hangs, holding the interpreter's lock or not,
    or ends its process, that is the verdict."""
    asked = "its first text"
    try:
        for told in told_apart(lambda send: send(audit(name, function, rows, told=send)), deadline_s):
            if isinstance(told, Audit):
                return told
            asked = told
        fault = f"ends its process, or uses up its memory, on {asked}"
    except TimeoutError:
        fault = f"has not returned for {deadline_s:g} s, on {asked}"
    return unfinished(name, fault, len(rows))


def made_problems(task: str, count: int) -> list[Problem]:
    """Sums in words, as problems of a task."""
    numbers = random.Random(0)
    rows = (sums.problem(numbers) for _ in range(count))
    # The value alone: every task's golds may be a number, none but GSM8K's a derivation.
    made = [{"question": row["question"], "answer": row["answer"].rpartition("#### ")[2]} for row in rows]
    return [problem_of_row(row, f"sums:{place}", task) for place, row in enumerate(made, start=1)]


def show(found: Audit, console: Console) -> None:
    table = Table(box=None, header_style="bold")
    for head in ("text", "expected", "found", "", "95 %"):
        table.add_column(head, justify="left" if head in ("text", "expected") else "right", no_wrap=True)
    for name, share in found.probes.items():
        expected = PROBES[name].expected
        table.add_row(name, EXPECTED[expected], *cells(share, "refused" if expected == "pays" else "paid"))
    table.add_row("all wrong texts", EXPECTED["less"], *cells(found.false_passes, "paid"))
    table.add_row("all right texts", EXPECTED["pays"], *cells(found.refusals, "refused"))
    if found.probes:  # none where it was not asked to the end
        console.print(table)
        console.print(f"{found.ms_median:.2f} ms a completion, at most {found.ms_max:.2f}", highlight=False)
    for line in (*found.faults, *found.notes, f"{found.name}: {found.verdict}, by {found.rows} rows"):
        console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


def cells(share: Share, word: str) -> tuple[str, str, str]:
    if not share.texts:
        return "", "", ""
    rate, low, high = share.rate
    return f"{word} {share.count} of {share.texts}", f"{rate:.0%}", f"{low:.0%} to {high:.0%}"
