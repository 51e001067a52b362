"""What there is to score: the problem set of each --dataset, and the worked examples of --few_shot."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perl.base.errors import UserError
from perl.base.paths import user_path
from perl.config.evaluation import EvalConfig
from perl.grading import RULES
from perl.prompts import ChatTemplate
from perl.records import Problem
from perl.scoring.problem_sets import ProblemSet, make_problem_set, named
from perl.tasks import TASKS, load_problems, problem_of_row, rows_of, worked_answer
from perl.tasks.files import Row, read_rows

log = logging.getLogger(__name__)

SAMPLING_FLAGS = ("n", "temperature", "top_p", "top_k", "max_new_tokens", "seed")


def load_problem_sets(config: EvalConfig, template: ChatTemplate, graded: bool = True) -> list[ProblemSet]:
    """Load every dataset and build its prompts. UserErrors name the dataset or the flag.

    Args:
        template: what words the prompts.
        graded: as load_problems has it.
    """
    specs = named(config.datasets, "--dataset", "score them apart")
    return [load_problem_set(config, template, spec, name, graded) for name, spec in specs.items()]


def load_problem_set(
    config: EvalConfig, template: ChatTemplate, spec: str, name: str, graded: bool = True
) -> ProblemSet:
    columns = config.environment.factory is not None
    problems = load_problems(spec, config.split, config.max_samples, config.task, graded, columns)
    examples = few_shot_examples(config, spec, problems)
    made = make_problem_set(problems, spec, name, template, given(config), config.system_prompt, examples)
    if made.sampling.temperature == 0 and (unused := [f"--{n}" for n in ("top_p", "top_k") if n in given(config)]):
        log.warning("%s is scored greedily: without --temperature %s has no effect", spec, " ".join(unused))
    return made


def given(config: EvalConfig) -> dict[str, Any]:
    """The fields of Sampling that flags have set."""
    return {name: value for name in SAMPLING_FLAGS if (value := getattr(config, name)) is not None}


def few_shot_examples(config: EvalConfig, spec: str, problems: Sequence[Problem]) -> tuple[tuple[str, str], ...]:
    """(question, worked answer) pairs of --few_shot."""
    if config.few_shot is None:
        return ()
    if config.few_shot.isdecimal():
        examples = _examples_of_split(spec, int(config.few_shot), config.task)
    else:
        examples = _examples_of_file(user_path(config.few_shot))
    questions = {problem.question for problem in problems if problem.question}
    if any(question in questions for question, _ in examples):
        raise UserError(
            f"--few_shot {config.few_shot}: one of these examples is among the problems of {spec} to be scored;"
            ' write a jsonl file of other {"question", "answer"} rows'
        )
    return tuple(examples)


def _examples_of_split(spec: str, count: int, task: str | None) -> list[tuple[str, str]]:
    examples = []
    for row, where, row_task in rows_of(spec, None if user_path(spec).is_file() else "train", task):
        if len(examples) == count:
            break
        problem = problem_of_row(row, where, row_task)
        if problem.question:
            examples.append((problem.question, _example(row, problem)))
    if len(examples) < count:
        raise UserError(f"--few_shot {count}: the train split of {spec} holds {len(examples)} usable rows")
    return examples


def _example(row: Row, problem: Problem) -> str:
    """The row's own derivation where it has one, else its gold in the form that the task asks for."""
    text = worked_answer(row, problem.source) or ""
    if len(text) > 2 * len(problem.gold) + 20:
        return text
    return RULES[TASKS[problem.task].rubric.form].state(problem.gold)


def _examples_of_file(file: Path) -> list[tuple[str, str]]:
    if not file.is_file():
        raise UserError(f'--few_shot {file}: no such file; write a number, or a jsonl file of {{"question", "answer"}}')
    if file.suffix != ".jsonl":
        raise UserError(f'--few_shot {file}: write a number, or a jsonl file of {{"question", "answer"}}')
    examples = []
    for row, where in read_rows(file):
        if not {"question", "answer"} <= row.keys():
            raise UserError(f'--few_shot {file.with_name(where)}: not a row {{"question": …, "answer": …}}')
        examples.append((str(row["question"]), str(row["answer"])))
    if not examples:
        raise UserError(f'--few_shot {file}: holds no row; write rows {{"question": …, "answer": …}}')
    return examples
