"""python -m perl retool: a small pretrained model learns to calculate by a tool, as in ReTool (arXiv 2504.11536).

    fetch  ->  score the base  ->  perl.sft on solutions that a script has made: arithmetic of many digits, one call of
    the tool python and a boxed answer; what the tool prints is not learned  ->  score  ->  perl.train (GRPO, the same
    adapter further, the tool in its sandbox)  ->  score  ->  table, JSON as the last line

`--arm text` has the same problems solved in writing, digit by digit, without a tool. perl/tools/course.py takes both
through the stages, as it does `perl real`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from perl.base.errors import UserError
from perl.config.parser import Parser
from perl.config.schema import EnvironmentConfig
from perl.config.types import NonNegativeInt, PositiveInt
from perl.environments.conversation import open_conversations
from perl.environments.tools import load_environment
from perl.prompts import ChatTemplate, build_messages
from perl.tasks import TASKS, problem_of_row
from perl.tools import arithmetic, course
from perl.tools.course import MODEL, TRAININGS, Course, Run
from perl.tools.fetch import MODELS
from perl.tools.stages import ROOT

Arm = Literal["tool", "text"]
TEMPLATE = Path(__file__).with_name("retool_template.j2")
"""Of a model whose own template says nothing of tools."""
ROOM = {"tool": 128, "text": 256}
"""Tokens of a completion, the tool's answers included; a product in writing needs up to 170."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Run):
    """What a run of this command is."""

    arm: Arm
    grpo_rows: int
    sandbox: Literal["limits", "namespaces"]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--output_dir", required=True, help="folder for everything; of an earlier run: it goes on")
    parser.add_argument("--seed", type=NonNegativeInt, default=1, help="of rows, training and evaluation")
    parser.add_argument("--arm", choices=["tool", "text"], default="tool", help="calculate by a tool, or in writing")
    parser.add_argument("--model", default=MODEL, help=f"{', '.join(MODELS)}, or the folder of another model")
    parser.add_argument("--sft_rows", type=PositiveInt, default=48, help="solutions for SFT")
    parser.add_argument("--grpo_rows", type=PositiveInt, default=160, help="problems for GRPO")
    parser.add_argument("--held_out", type=PositiveInt, default=60, help="problems to score on")
    for name, what in (("sft_steps", "steps of SFT"), ("grpo_steps", "steps of GRPO")):
        parser.add_argument(f"--{name}", type=PositiveInt, default=None, help=f"{what}; default: its recipe's")
    parser.add_argument(
        "--sandbox",
        choices=["limits", "namespaces"],
        default="namespaces",
        help="the least isolation of the tool (environment.sandbox)",
    )


def run(args: argparse.Namespace) -> int:
    course.require_few(args, "sft_rows", "grpo_rows", "held_out")
    names = ("seed", "arm", "sft_rows", "grpo_rows", "held_out", "sandbox")
    given: dict[str, Any] = {name: getattr(args, name) for name in names}
    rows = make_rows(**given)
    settings = Settings(
        model=course.base_of(str(args.model)),
        data=course.hash_of(rows),
        sft_steps=args.sft_steps,
        grpo_steps=args.grpo_steps,
        **given,
    )
    by_tool = settings.arm == "tool"
    if by_tool:
        with load_environment(environment(settings)).opened():  # what can't be isolated here is said at once
            pass
    return course.run(
        Course(
            settings=settings,
            rows=rows,
            recipes={name: ROOT / "recipes" / f"retool_{name}.yaml" for name in TRAININGS},
            title=f"Accuracy on held-out arithmetic {'with the tool' if by_tool else 'in writing'}",
            max_new_tokens=ROOM[settings.arm],
            train_flags={name: arm_flags(settings, name) for name in TRAININGS},
            eval_flags=tool_flags(settings, "--environment") if by_tool else (),
            prepare=partial(tell_of_tools, settings) if by_tool else None,
            result={"arm": settings.arm},
        ),
        args.output_dir,
    )


def arm_flags(settings: Settings, training: str) -> list[str]:
    """What differs between the arms, of one of TRAININGS."""
    if settings.arm == "text":
        return [] if training == "sft" else ["--config.training.max_completion_length", str(ROOM["text"])]
    if training == "sft":
        return ["--config.training.assistant_only_loss", "true"]
    return [*tool_flags(settings, "--config.environment")]


def environment(settings: Settings) -> EnvironmentConfig:
    """The tool of a run, in GRPO and in its scores."""
    return EnvironmentConfig(tools=["python"], sandbox=settings.sandbox, max_turns=3, max_observation_tokens=64)


def tool_flags(settings: Settings, group: str) -> tuple[str, ...]:
    """`environment`, of the trainer's or the evaluator's group."""
    of = environment(settings)
    values = {"tools": json.dumps(of.tools), "sandbox": of.sandbox}
    values |= {"max_turns": of.max_turns, "max_observation_tokens": of.max_observation_tokens}
    return tuple(word for name, value in values.items() for word in (f"{group}.{name}", str(value)))


def tell_of_tools(settings: Settings, folder: Path) -> None:
    """Have the fetched model's chat template list tools, and mark the assistant's tokens. A UserError where a model of
    the user's own has one that lists none."""
    from perl.models.folders import load_tokenizer

    model = course.model_folder(settings, folder)
    if settings.model in MODELS:
        shutil.copyfile(TEMPLATE, model / "chat_template.jinja")
        return
    config = environment(settings)
    template = ChatTemplate(load_tokenizer(str(model)))
    if not open_conversations(config, load_environment(config), template).template.lists_tools:
        raise UserError(
            f"--model {model}: its chat template lists no tools; name a model whose template does, or put"
            f" {TEMPLATE.relative_to(ROOT)} into its folder as chat_template.jinja"
        )


def make_rows(
    *, seed: int, arm: Arm, sft_rows: int, grpo_rows: int, held_out: int, sandbox: str
) -> dict[str, list[str]]:
    """The rows of each training and those that are scored; no problem is among two of them. Both arms of a seed have
    the same problems, also where they have another number of solutions, which are made last."""
    numbers, told = random.Random(seed), set[str]()

    def some(count: int) -> list[arithmetic.Problem]:
        made: list[arithmetic.Problem] = []
        while len(made) < count:
            if (problem := arithmetic.make(numbers)).told not in told:
                told.add(problem.told)
                made.append(problem)
        return made

    test, asked, worked = some(held_out), some(grpo_rows), some(sft_rows)
    tools = load_environment(EnvironmentConfig(tools=["python"], sandbox=sandbox)).schemas  # type: ignore[arg-type]
    solutions = []
    for problem in worked:
        row = arithmetic.row(problem)
        read = problem_of_row(row, "a row of perl retool", None)
        prompt = build_messages(read, TASKS[read.task].style)
        is_tool = arm == "tool"
        solutions.append(
            arithmetic.by_tool(problem, prompt, tools) if is_tool else arithmetic.in_writing(problem, prompt)
        )
    return {
        "sft": [json.dumps(row) for row in solutions],
        "grpo": [json.dumps(arithmetic.row(problem)) for problem in asked],
        "test": [json.dumps(arithmetic.row(problem)) for problem in test],
    }
