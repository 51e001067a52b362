"""The samples of a dataset: each problem's key and prompt, each completion's seed, and its graded record.

Evaluation and validation make theirs here, so that they ask, draw and write down the same.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from perl.base.errors import UserError
from perl.base.paths import user_path
from perl.models.images import fitted, has_images
from perl.prompts import ChatTemplate, PromptStyle, build_messages, decode
from perl.records import Completion, Grade, Problem, Sample, Sampling, Talked, row_seed
from perl.scoring.results import ConversationRecord, SampleRecord
from perl.tasks import TASKS
from perl.tasks.trained import problem_hash

ENVIRONMENT = "environment"
"""Name of its reward among the rules' scores."""


def make_samples(
    problems: Sequence[Problem],
    dataset: str,
    sampling: Sampling,
    styles: Mapping[str, PromptStyle],
    template: ChatTemplate,
) -> list[Sample]:
    """`sampling.n` samples of each problem, side by side.

    Args:
        dataset: `Sample.dataset`.
        styles: how prompts are built, by task.
        template: what words the prompts; of conversations with an environment theirs.
    """
    samples = []
    for problem, key in zip(problems, problem_keys(problems), strict=True):
        messages = build_messages(problem, styles[problem.task])
        messages = fitted(messages, problem.images, has_images(template.tokenizer), problem.source)
        token_ids = tuple(template.prompt(messages, problem.images, problem.source))
        text = template.text(messages)
        samples += [
            Sample(
                token_ids=token_ids,
                seed=row_seed(sampling.seed, key, index),
                sampling=sampling,
                dataset=dataset,
                key=key,
                index=index,
                problem=problem,
                prompt_text=text,
                messages=tuple(messages),
                images=problem.images,
            )
            for index in range(sampling.n)
        ]
    return samples


def folder_name(spec: str) -> str:
    """gsm8k for gsm8k, open-r1_DAPO-Math-17k-Processed for the hub's name, test for data/test.parquet."""
    path = user_path(spec)
    if spec not in TASKS and os.path.exists(path):  # Path.exists raises for a name that is too long
        spec = path.resolve().stem if path.is_file() else path.resolve().name
    return re.sub(r"[^\w.\-]+", "_", spec).strip("._") or "dataset"


def folder_names(specs: Sequence[str]) -> list[str]:
    """folder_name of each, the name of its own folder before that of a file which is called as another one:
    gsm8k_test and math_test for data/gsm8k/test.parquet and data/math/test.parquet."""
    names = [folder_name(spec) for spec in specs]
    count = Counter(names)
    return [
        f"{folder_name(str(path.resolve().parent))}_{name}" if count[name] > 1 and os.path.exists(path) else name
        for name, path in zip(names, (user_path(spec) for spec in specs), strict=True)
    ]


def sampling_of_task(task: str, given: Mapping[str, Any], flag: str = "--") -> Sampling:
    """The task's own sampling, with what is given over it; greedy is one sample a problem where nothing else is said.

    Args:
        task: "": none.
        given: fields of Sampling that the user has set.
        flag: what stands before a field's name in a flag, for messages.
    """
    sampling = replace(TASKS[task].sampling if task else Sampling(), **given)
    if sampling.temperature == 0 and "n" not in given:
        sampling = replace(sampling, n=1)
    if sampling.top_p == 0:
        raise UserError(f"{flag}top_p 0: leaves no token to sample; write 1 for off, or {flag}temperature 0 for greedy")
    if sampling.n > 1 and sampling.temperature == 0:
        raise UserError(
            f"{flag}n {sampling.n} with temperature 0: greedy completions of a problem are all the same;"
            f" write {flag}temperature 1, or {flag}n 1"
        )
    return sampling


def style_of_task(task: str, system_prompt: str | None, examples: tuple[tuple[str, str], ...] = ()) -> PromptStyle:
    """The task's style ("": the bare question) with the user's system prompt, and (question, worked answer) pairs
    before each question."""
    style = TASKS[task].style if task else PromptStyle()
    if system_prompt is not None:
        style = replace(style, system_prompt=system_prompt)
    return replace(style, few_shot=examples) if examples else style


def problem_keys(problems: Sequence[Problem]) -> list[str]:
    """A key for each problem: 16 hexadecimal digits of its content, and which of the equal ones it is. The order in
    which a dataset lists different problems does not change a key."""
    seen: Counter[str] = Counter()
    keys = []
    for problem in problems:
        digest = problem_hash(problem)
        keys.append(f"{digest}-{seen[digest]}")
        seen[digest] += 1
    return keys


def cluster_of(key: str) -> str:
    """Equal problems are one cluster: their answers are no independent evidence."""
    return key.partition("-")[0]


def text_of_completion(tokenizer: Any, completion: Completion) -> str:
    """What is graded: of a conversation its last turn."""
    return completion.text if isinstance(completion, Talked) else decode(tokenizer, completion.content_ids)


def rewarded(grade: Grade, reward: float | None) -> Grade:
    """The verdict on a conversation: where its environment has given a reward, that is the score, a reward below 0
    counting as 0 and one above 1 as 1; else the grader's stands. What was read as the answer is the grader's.

    Args:
        reward: None: none was given.
    """
    if reward is None:
        return grade
    score = min(1.0, max(0.0, reward))
    reason = "correct" if score == 1.0 else "wrong"
    return replace(grade, score=score, scores={**grade.scores, ENVIRONMENT: score}, reason=reason)


def record_of(sample: Sample, completion: Completion, text: str, grade: Grade, engine: str) -> SampleRecord:
    """A line of samples.jsonl.

    Args:
        text: the completion's (`text_of_completion`).
        engine: key of ENGINES.
    """
    talked: dict[str, Any] = {}
    if isinstance(completion, Talked):
        grade = rewarded(grade, completion.reward)
        if completion.reward is None and completion.error is None and not sample.problem.gradable:
            talked["error"] = "get_reward gave None, and the row has no answer that a task grades"
        talked |= {"prompt": completion.prompt_text, "prompt_tokens": completion.prompt_tokens}
        talked["conversation"] = ConversationRecord(
            messages=list(completion.messages),
            turns=completion.turns,
            observed_tokens=completion.observed,
            reward=completion.reward,
        )
    record: SampleRecord = {
        "key": sample.key,
        "sample": sample.index,
        "seed": sample.seed,
        "task": sample.problem.task,
        "source": sample.problem.source,
        "prompt": sample.prompt_text,
        "gold": sample.problem.gold,
        "completion": text,
        "score": grade.score,
        "scores": grade.scores,
        "extracted": grade.extracted,
        "reason": grade.reason,
        "prompt_tokens": len(sample.token_ids),
        "tokens": len(completion.content_ids),
        "finish_reason": completion.finish_reason,
        "time": round(completion.seconds, 4),
        "engine": engine,
        "error": completion.error,
    }
    return cast("SampleRecord", record | talked)
