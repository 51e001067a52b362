"""The tasks: where each one's problems lie, how they are asked, and which rubric grades them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perl.grading import Rubric
from perl.prompts import PromptStyle
from perl.records import Sampling
from perl.tasks.hub import Hub
from perl.tasks.schemas import gold_text, gsm8k_gold, integer_gold, math_gold


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of problem."""

    name: str
    hub: Hub | None
    """None: a task for the user's own files."""
    data_source: str
    """verl's name for the data, in its column of that name."""
    style: PromptStyle
    rubric: Rubric
    sampling: Sampling
    """The evaluation's defaults."""
    read_gold: Callable[[Any], str]
    """The stored answer in the form that the rubric's rules compare; raises ValueError when it cannot be one."""


# verl's wording, so that a prompt of `prepare` equals one built from the bare question.
_GSM8K_STYLE = PromptStyle(
    template='{question} Let\'s think step by step and output the final answer after "####".',
)
# The wording of DAPO's own data (arXiv 2503.14476), as in its `source_prompt`.
_DAPO_STYLE = PromptStyle(
    template="Solve the following math problem step by step. The last line of your response should be of the form"
    " Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
)
# The wording of verl's examples/data_preprocess/geo3k.py.
_GEOMETRY_STYLE = PromptStyle(
    template="{question} You FIRST think about the reasoning process as an internal monologue and then provide the"
    " final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put"
    " in \\boxed{}.",
)
_BOXED_STYLE = PromptStyle(
    template="{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
)

# Primary: flexible. lm-evaluation-harness reports both and verl's default is strict, but strict also measures whether
# the marker is written exactly, so an instruct model that answers \boxed{18} or `#### $18` scores 0. What is asked of
# a model here is the number; the marker is the format reward's affair, and `strict` stands next to it in every report.
_GSM8K_RUBRIC = Rubric(rules=("strict", "flexible"), primary="flexible", math_verify="fallback", form="strict")
# DAPO grades the last `Answer:` line by its normalized text. Golds are integers, which `answer` compares exactly; an
# expression (`Answer: 2^5`) goes to math-verify, where DAPO's own grader gives no point.
_DAPO_RUBRIC = Rubric(
    rules=("answer", "answer_line", "boxed"), primary="answer", math_verify="fallback", form="answer_line"
)
# Golds of every kind: the parts of the stated answer are compared, plain expressions by math-verify. `boxed` stands
# next to it: the box alone, by its text.
_MATH_RUBRIC = Rubric(rules=("stated", "boxed"), primary="stated", math_verify="parts", form="boxed")

_GREEDY = Sampling(n=1, temperature=0.0, max_new_tokens=2048)
# Thirty or forty problems decide nothing with one sample each; temperature and top_p are DAPO's for AIME.
_AVG_32 = Sampling(n=32, temperature=1.0, top_p=0.7, max_new_tokens=4096)


def _bench(name: str, hub: Hub | None, data_source: str, sampling: Sampling) -> Task:
    """A task of LaTeX answers, asked for in a box and graded part by part."""
    return Task(
        name=name,
        hub=hub,
        data_source=data_source,
        style=_BOXED_STYLE,
        rubric=_MATH_RUBRIC,
        sampling=sampling,
        read_gold=math_gold,
    )


_DAPO_HUB = Hub(
    repo="open-r1/DAPO-Math-17k-Processed",
    config="en",
    train_split="train",
    eval_split="train",
    modelscope="open-r1/DAPO-Math-17k-Processed",
)
_MATH500_HUB = Hub(repo="HuggingFaceH4/MATH-500", eval_split="test", modelscope="AI-ModelScope/MATH-500")
_AIME24_HUB = Hub(repo="HuggingFaceH4/aime_2024", eval_split="train", modelscope="HuggingFaceH4/aime_2024")
_AIME25_HUB = Hub(repo="math-ai/aime25", eval_split="test", modelscope="evalscope/aime25")
_AMC23_HUB = Hub(
    repo="math-ai/amc23", eval_split="test", modelscope=""
)  # evalscope's AMC is another choice of problems

TASKS: dict[str, Task] = {
    "gsm8k": Task(
        name="gsm8k",
        hub=Hub(
            repo="openai/gsm8k",
            config="main",
            train_split="train",
            eval_split="test",
            modelscope="AI-ModelScope/gsm8k",
        ),
        data_source="openai/gsm8k",
        style=_GSM8K_STYLE,
        rubric=_GSM8K_RUBRIC,
        sampling=Sampling(n=1, temperature=0.0, max_new_tokens=512),
        read_gold=gsm8k_gold,
    ),
    "dapo-math": Task(
        name="dapo-math",
        hub=_DAPO_HUB,
        data_source="math_dapo",
        style=_DAPO_STYLE,
        rubric=_DAPO_RUBRIC,
        sampling=_GREEDY,
        read_gold=integer_gold,
    ),
    "math500": _bench("math500", _MATH500_HUB, "HuggingFaceH4/MATH-500", _GREEDY),
    "aime24": _bench("aime24", _AIME24_HUB, "aime24", _AVG_32),
    "aime25": _bench("aime25", _AIME25_HUB, "aime25", _AVG_32),
    "amc23": _bench("amc23", _AMC23_HUB, "amc23", _AVG_32),
    # One-step word problems (arXiv 2103.07191), from files in GSM8K's form: the hub's copies have columns of their own.
    "svamp": Task(
        name="svamp",
        hub=None,
        data_source="svamp",
        style=_GSM8K_STYLE,
        rubric=_GSM8K_RUBRIC,
        sampling=Sampling(n=1, temperature=0.0, max_new_tokens=256),
        read_gold=gsm8k_gold,
    ),
    # Geometry with a figure (arXiv 2105.04165): `<image>` in the problem stands for the image of its column.
    "geometry3k": Task(
        name="geometry3k",
        hub=Hub(repo="hiyouga/geometry3k", train_split="train", eval_split="test", modelscope="hiyouga/geometry3k"),
        data_source="hiyouga/geometry3k",
        style=_GEOMETRY_STYLE,
        rubric=_MATH_RUBRIC,
        sampling=_GREEDY,
        read_gold=math_gold,
    ),
    # Any of reasoning-gym's generators (perl.tasks.reasoning_gym); the wording is near its own system prompt.
    "reasoning_gym": Task(
        name="reasoning_gym",
        hub=None,
        data_source="reasoning_gym",
        style=PromptStyle(
            template="{question}\n\nThink step by step, and put the final answer alone between <answer> and </answer>.",
        ),
        rubric=Rubric(rules=("answer_tag",), primary="answer_tag", math_verify="own", form="answer_tag"),
        sampling=_GREEDY,
        read_gold=gold_text,
    ),
    # Any mathematics whose data set is not named above: a user's file of problems and LaTeX answers.
    "math": _bench("math", None, "lighteval/MATH", _GREEDY),
}

HUBS: dict[str, tuple[str, Hub]] = {
    **{task.hub.repo: (task.name, task.hub) for task in TASKS.values() if task.hub},
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        "dapo-math",
        Hub(
            repo="BytedTsinghua-SIA/DAPO-Math-17k",
            train_split="train",
            eval_split="train",
            repeats=True,
            modelscope="AI-ModelScope/DAPO-Math-17k",
        ),
    ),
}
"""(task, place) by hub name: each task's own repository, and others of the same data."""

DATA_SOURCES: dict[str, str] = {
    **{name: name for name in TASKS},
    **{task.data_source: task.name for task in TASKS.values()},
    **{repo: name for repo, (name, _) in HUBS.items()},
    "openai/prm800k math_splits": "math500",
    "DigitalLearningGmbH/MATH-lighteval": "math",
}
"""Task of a row by its `data_source` (verl) or `source` column."""

SCHEMA_TASKS = {"dapo": "dapo-math", "bench": "math"}
"""Task of a row by its schema, where it names no known source."""
