"""python -m perl.tools.converse: score a model that may use the tool python; a stage of `python -m perl retool`.

The evaluator draws one turn. Here each completion is a conversation as in a training (perl.environments): the tool's
answers are shown, and what the last turn says is graded by the task. RESULT_DIR/NAME gets samples.jsonl and
summary.json, with the mean over all completions and its 95 % interval, problems drawn with replacement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perl.base.errors import report_errors
from perl.base.files import atomic_write, write_json
from perl.base.paths import user_path
from perl.config.parser import Parser
from perl.config.schema import EnvironmentConfig
from perl.config.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from perl.engines.base import DTYPES
from perl.engines.hf import HFEngine
from perl.environments.conversation import Conversations
from perl.environments.template import ChatTemplate
from perl.environments.tools import load_environment
from perl.grading import Grader
from perl.prompts import build_messages, row_seed
from perl.records import Problem, Prompt, Sampling, Trajectory
from perl.rewards.files import text_of
from perl.rewards.functions import grade_rows
from perl.scoring.statistics import clustered_bootstrap
from perl.tasks import TASKS, load_problems

TURNS, OBSERVED = 3, 64
"""Turns of a conversation, and tokens that are shown of the tool's answers to one."""


def conversations(tokenizer: Any, sandbox: str = "limits", max_turns: int = TURNS) -> Conversations:
    """With the tool python, as recipes/retool_grpo.yaml has it."""
    config = EnvironmentConfig(
        tools=["python"],
        max_turns=max_turns,
        max_observation_tokens=OBSERVED,
        sandbox=sandbox,  # type: ignore[arg-type]
    )
    source = load_environment(config)
    template = ChatTemplate(tokenizer, source.schemas, source.role, config.tool_call_parser, most=OBSERVED)
    return Conversations(source=source, template=template, config=config)


def drawn(
    talks: Conversations, engine: HFEngine, problems: list[Problem], sampling: Sampling, seed: int
) -> Iterator[Trajectory]:
    """Each completion of each problem when its conversation has ended. Prompt and completion together have as many
    tokens as the model takes, completions as many as `sampling` says, tool's answers included."""
    rows = []
    for position, problem in enumerate(problems):
        messages = build_messages(problem, TASKS[problem.task].style)
        ids = tuple(talks.template.prompt(messages))
        for sample in range(sampling.n):
            rows.append(Trajectory(row={"prompt": messages}, position=position, sample=sample, prompt_ids=ids))

    def prompt(row: Trajectory) -> Prompt:
        token_ids = row.prompt_ids + tuple(row.token_ids)
        left = sampling.max_new_tokens - len(row.token_ids)
        if engine.context is not None:
            left = min(left, engine.context - len(token_ids))
        return Prompt(
            token_ids=token_ids,
            seed=row_seed(seed, f"problem-{row.position}", row.sample, row.turns),
            sampling=Sampling(n=1, temperature=sampling.temperature, max_new_tokens=left),
        )

    with talks.source.opened():
        yield from talks.run(rows, engine, prompt)


def score(talks: Conversations, engine: HFEngine, data: Path, sampling: Sampling, seed: int, folder: Path) -> None:
    """Draw, grade and write: the samples in their order, then the summary."""
    problems = load_problems(str(data))
    ended = sorted(drawn(talks, engine, problems, sampling, seed), key=lambda row: (row.position, row.sample))
    texts = ["" if row.failure else text_of(row.completion) for row in ended]
    asked = [problems[row.position] for row in ended]
    with Grader() as grader:
        grades = grade_rows(grader, texts, [each.gold for each in asked], [each.task for each in asked])
    scores = [grade.score for grade in grades]
    by_problem = [sum(scores[i : i + sampling.n]) / sampling.n for i in range(0, len(scores), sampling.n)]
    estimate = clustered_bootstrap(by_problem, list(range(len(by_problem))))
    asked_the_tool = [any(message["role"] == "tool" for message in row.completion or ()) for row in ended]
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "samples.jsonl") as file:
        for row, problem, got in zip(ended, asked, scores, strict=True):
            said = {"problem": problem.question, "gold": problem.gold, "sample": row.sample, "score": got}
            said |= {"completion": row.completion, "turns": row.turns, "finish": row.finish, "failure": row.failure}
            file.write(json.dumps(said, ensure_ascii=False) + "\n")
    write_json(
        folder / "summary.json",
        {
            "metrics": {"accuracy": estimate._asdict()},
            "n": sampling.n,
            "problems": len(problems),
            "turns": sum(row.turns for row in ended) / len(ended),
            "answered_by_a_tool": sum(asked_the_tool) / len(ended),
            "cut_off": sum(row.finish == "length" for row in ended) / len(ended),
        },
    )


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--model", required=True, help="folder of a model, merged with its adapter")
    parser.add_argument("--data", required=True, help="file of problems")
    parser.add_argument("--result_dir", required=True, help="folder to write; the data set's name is a folder in it")
    parser.add_argument("--n", type=PositiveInt, default=1, help="completions of each problem")
    parser.add_argument("--temperature", type=NonNegativeFloat, default=0.0, help="0 is greedy")
    parser.add_argument("--max_new_tokens", type=PositiveInt, default=128, help="of a conversation, all turns together")
    parser.add_argument("--seed", type=NonNegativeInt, default=1, help="of what is drawn")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="what the model computes in")
    parser.add_argument("--sandbox", default="limits", choices=["limits", "namespaces"], help="the least isolation")


def run(args: argparse.Namespace) -> int:
    data, folder = user_path(args.data), user_path(args.result_dir)
    engine = HFEngine(str(user_path(args.model)), dtype=args.dtype)
    sampling = Sampling(n=args.n, temperature=args.temperature, max_new_tokens=args.max_new_tokens)
    try:
        score(conversations(engine.tokenizer, args.sandbox), engine, data, sampling, args.seed, folder / data.stem)
    finally:
        engine.close()
    return 0


@report_errors()
def main() -> None:
    parser = Parser(prog="python -m perl.tools.converse", description=__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
