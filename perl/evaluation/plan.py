"""What there is to do: the samples of each dataset, each with its key, its prompt and its seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.config.evaluation import EvalConfig
from perl.errors import UserError
from perl.grading import RULES
from perl.prompts import PromptStyle
from perl.records import Problem, Sample, Sampling
from perl.scoring.samples import folder_names, make_samples, sampling_of_task, style_of_task
from perl.tasks import TASKS, data_name, load_problems, problem_of_row, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLING_FLAGS = ("n", "temperature", "top_p", "top_k", "max_new_tokens", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One dataset of the evaluation."""

    name: str
    """Name of its folder below --result_dir, or below a candidate's."""
    spec: str
    """What the user wrote after --dataset."""
    tasks: tuple[str, ...]
    """The tasks that grade its problems, the commonest first."""
    sampling: Sampling
    styles: Mapping[str, PromptStyle]
    """By task."""
    samples: tuple[Sample, ...]
    problems: int

    @property
    def dataset(self) -> str:
        """`Sample.dataset` of its samples."""
        return self.samples[0].dataset

    def of_candidate(self, name: str, adapter: str | None) -> Plan:
        """The same for a candidate of a sweep: its samples are stored in its folder and completed with its adapter.

        Args:
            name: of the candidate's folder; empty outside a sweep.
            adapter: as in Prompt.
        """
        dataset = f"{name}/{self.name}".lstrip("/")
        samples = tuple(replace(sample, dataset=dataset, adapter=adapter) for sample in self.samples)
        return replace(self, samples=samples)


def make_plans(config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> list[Plan]:
    """Load every dataset and build its prompts. UserErrors name the dataset or the flag."""
    plans: dict[str, Plan] = {}
    specs = [data_name(spec) for spec in config.datasets]
    for spec, name in zip(specs, folder_names(specs), strict=True):
        if name in plans:
            raise UserError(
                f"--dataset: {spec} and {plans[name].spec} would both be written to {name}; score them apart"
            )
        plans[name] = make_plan(config, tokenizer, spec, name)
    return list(plans.values())


def make_plan(config: EvalConfig, tokenizer: PreTrainedTokenizerBase, spec: str, name: str) -> Plan:
    problems = load_problems(spec, split=config.split, limit=config.max_samples, task=config.task)
    tasks = tuple(task for task, _ in Counter(problem.task for problem in problems).most_common())
    sampling = choose_sampling(config, tasks[0])
    examples = few_shot_examples(config, spec, problems)
    styles = {task: style_of_task(task, config.system_prompt, examples) for task in tasks}
    samples = make_samples(problems, name, sampling, styles, tokenizer)
    return Plan(
        name=name,
        spec=spec,
        tasks=tasks,
        sampling=sampling,
        styles=styles,
        samples=tuple(samples),
        problems=len(problems),
    )


def choose_sampling(config: EvalConfig, task: str) -> Sampling:
    """The task's own sampling, with what the flags say over it."""
    given = {name: value for name in SAMPLING_FLAGS if (value := getattr(config, name)) is not None}
    return sampling_of_task(task, given)


def few_shot_examples(config: EvalConfig, spec: str, problems: Sequence[Problem]) -> tuple[tuple[str, str], ...]:
    """(question, worked answer) pairs of --few_shot."""
    if config.few_shot is None:
        return ()
    if config.few_shot.isdecimal():
        examples = _examples_of_split(spec, int(config.few_shot), config.task)
    else:
        examples = _examples_of_file(Path(config.few_shot).expanduser())
    asked = {problem.question for problem in problems if problem.question}
    if any(question in asked for question, _ in examples):
        raise UserError(
            f"--few_shot {config.few_shot}: one of these examples is among the problems of {spec} to be scored;"
            ' write a jsonl file of other {"question", "answer"} rows'
        )
    return tuple(examples)


def _examples_of_split(spec: str, count: int, task: str | None) -> list[tuple[str, str]]:
    examples = []
    for row, where, row_task in rows_of(spec, "train", task):
        if len(examples) == count:
            break
        problem = problem_of_row(row, where, row_task)
        if problem.question:
            examples.append((problem.question, _worked_answer(row, problem)))
    if len(examples) < count:
        raise UserError(f"--few_shot {count}: the train split of {spec} holds {len(examples)} usable rows")
    return examples


def _worked_answer(row: Mapping[str, Any], problem: Problem) -> str:
    """The row's own derivation where it has one, else its gold in the form that the task asks for."""
    extra = row.get("extra_info")
    texts = [row.get("solution"), row.get("answer"), extra.get("answer") if isinstance(extra, Mapping) else None]
    longest = max((text for text in texts if isinstance(text, str)), key=len, default="")
    if len(longest) > 2 * len(problem.gold) + 20:
        return longest
    return RULES[TASKS[problem.task].rubric.form].state(problem.gold)


def _examples_of_file(file: Path) -> list[tuple[str, str]]:
    if not file.is_file():
        raise UserError(f'--few_shot {file}: no such file; write a number, or a jsonl file of {{"question", "answer"}}')
    examples = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
                examples.append((str(row["question"]), str(row["answer"])))
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f'--few_shot {file}:{number}: not a row {{"question": …, "answer": …}}') from error
    return examples
