"""A dataset to score, by an evaluation or by a validation during training: its problems, and each sample of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from perl.base.errors import UserError
from perl.grading.entries import require_scoring
from perl.prompts import ChatTemplate, PromptStyle
from perl.records import Problem, Sample, Sampling
from perl.scoring.samples import folder_names, make_samples, sampling_of_task, style_of_task
from perl.tasks import TASKS, data_name

if TYPE_CHECKING:
    from perl.scoring.results import HowAsked


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """One dataset, as far as it is scored."""

    name: str
    """Name of the folder of its results."""
    spec: str
    """What the user wrote."""
    tasks: tuple[str, ...]
    """The tasks that grade its problems, the commonest first."""
    sampling: Sampling
    styles: Mapping[str, PromptStyle]
    """By task."""
    samples: tuple[Sample, ...]
    """sampling.n of each problem, side by side."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template was given besides."""

    @property
    def dataset(self) -> str:
        """`Sample.dataset` of its samples."""
        return self.samples[0].dataset

    @property
    def sources(self) -> list[str]:
        """The data sources of its problems, the commonest first."""
        return [name for name, _ in Counter(s.problem.data_source for s in self.samples).most_common()]

    @property
    def problems(self) -> dict[str, Problem]:
        """Its problems, by key."""
        return {sample.key: sample.problem for sample in self.samples}

    @property
    def keys(self) -> set[str]:
        """The keys of its problems."""
        return {sample.key for sample in self.samples}

    @property
    def asked(self) -> HowAsked:
        """For run.json and summary.json."""
        sampling = asdict(self.sampling)
        sampling.pop("n")
        styles: Any = json.loads(json.dumps({task: asdict(style) for task, style in self.styles.items()}))
        asked: HowAsked = {"dataset": self.spec, "styles": styles, "sampling": sampling}
        if self.template_kwargs:
            asked["chat_template_kwargs"] = dict(self.template_kwargs)
        return asked

    def of_candidate(self, name: str, adapter: str | None) -> ProblemSet:
        """The same for a candidate of a sweep: its samples are stored in its folder and completed with its adapter.

        Args:
            name: of the candidate's folder; empty outside a sweep.
            adapter: as in Prompt.
        """
        dataset = f"{name}/{self.name}".lstrip("/")
        samples = tuple(replace(sample, dataset=dataset, adapter=adapter) for sample in self.samples)
        return replace(self, samples=samples)


def make_problem_set(
    problems: Sequence[Problem],
    spec: str,
    name: str,
    template: ChatTemplate,
    given: Mapping[str, Any],
    system_prompt: str | None = None,
    examples: tuple[tuple[str, str], ...] = (),
    flag: str = "--",
) -> ProblemSet:
    """The problem set of a dataset's problems, with the sampling of the task that is commonest among them.

    Args:
        template: as in `make_samples`.
        given: fields of Sampling that the user has set.
        examples: (question, worked answer) pairs before each question.
        flag: what stands before a field's name in a flag, for messages.

    Raises:
        UserError: what grades a problem is not installed.
    """
    for problem in problems:
        if problem.task and TASKS[problem.task].rubric.math_verify == "own":
            require_scoring(problem.gold)
    tasks = tuple(task for task, _ in Counter(problem.task for problem in problems).most_common())
    sampling = sampling_of_task(tasks[0], given, flag)
    styles = {task: style_of_task(task, system_prompt, examples) for task in tasks}
    samples = tuple(make_samples(problems, name, sampling, styles, template))
    return ProblemSet(
        name=name,
        spec=spec,
        tasks=tasks,
        sampling=sampling,
        styles=styles,
        samples=samples,
        template_kwargs=template.given,
    )


def named(specs: Iterable[str], flag: str, cure: str) -> dict[str, str]:
    """The datasets that the user names, by the name of each one's folder.

    Args:
        flag: where they are named; with `cure`, what to do about two of one name, for the UserError.
    """
    known: dict[str, str] = {}
    every = [data_name(spec) for spec in specs]
    for spec, name in zip(every, folder_names(every), strict=True):
        if name in known:
            raise UserError(f"{flag}: {spec} and {known[name]} would both be written to {name}; {cure}")
        known[name] = spec
    return known
