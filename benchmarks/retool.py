"""Does a tool help a small model where writing does not? `python -m perl retool` in both arms, over three seeds.

    python -m benchmarks.retool [--arms tool,text] [--seeds 1,2,3] [--work outputs/retool]
    python -m benchmarks.retool --show

A run of each arm and seed adds a line of JSON to --output (docs/results/retool.jsonl): scores of base, SFT and GRPO on
the held-out problems, seconds of its stages, settings, SFT's tokens, versions and commit. One that stands there is not
repeated, and one that was interrupted goes on. The problems of a seed are the same in both arms, and none of them is in
two of the splits (perl.tools.retool.make_rows). Both arms get the same time and data, as near as whole rows and steps
come:

    SFT    rows of as many tokens, prompts included, as the tool's
    GRPO   as many steps as take the time of the tool's, each by the median of PROBE steps, one arm timed after the
           other on the machine that `text` is run on

so that `text` needs the tool's line of its seed. It is solved in writing as models of this size do best: the long
factor times each digit of the short one, and running sums.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import real
from benchmarks._learning import markdown
from perl.base.errors import UserError, report_errors, stopped_by_signals
from perl.base.files import add_row, read_json, read_rows
from perl.models.folders import load_tokenizer
from perl.scoring.statistics import seeds_reach
from perl.tools import course, retool
from perl.tools.stages import ROOT, StageError, signals_held

RESULTS = ROOT / "docs" / "results" / "retool.jsonl"
ARMS, SEEDS = ("tool", "text"), (1, 2, 3)
SFT_ROWS, GRPO_ROWS, HELD_OUT, STEPS = 48, 160, 200, 60
"""Of the tool; a step has four prompts, so that 160 problems are asked one and a half times."""
PROBE = 3
"""Steps of GRPO that are timed."""


def command(folder: Path, arm: str, seed: int, sft_rows: int, steps: int, held_out: int) -> list[str]:
    words = [sys.executable, "-m", "perl", "retool", "--output_dir", str(folder), "--seed", str(seed)]
    sizes = {"sft_rows": sft_rows, "grpo_rows": GRPO_ROWS, "held_out": held_out, "grpo_steps": steps}
    return [*words, *flags({"arm": arm} | sizes)]


def flags(settings: Mapping[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def run(words: Sequence[str]) -> None:
    """A whole run of `perl retool`, which says on the screen where it is and ends with this process."""
    with signals_held():
        process = subprocess.Popen(words, cwd=ROOT)
    try:
        code = process.wait()
    except BaseException:  # a signal, which ends what a run has started too
        process.terminate()
        process.wait()
        raise
    if code:
        raise StageError("perl retool has ended; the same command goes on from there")


def row_of(folder: Path, tokens: int) -> dict[str, Any]:
    """A finished run's line for the list of results; `tokens` of the rows that SFT had."""
    times, settings = step_times(folder), read_json(folder / course.SETTINGS)
    given = flags({name: settings[name] for name in ("arm", "sft_rows", "grpo_rows", "held_out", "grpo_steps")})
    measured = {"steps": len(times), "step_s": round(statistics.median(times), 2), "sft_tokens": tokens}
    return real.row_of(folder, "retool", f" {' '.join(given)}") | measured


def step_times(folder: Path) -> list[float]:
    """Seconds of each step of GRPO."""
    lines = (folder / "grpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["step_time"] for row in map(json.loads, lines) if "step_time" in row]


def tokens_of(arm: str, seed: int, sft_rows: int, model: Path) -> list[int]:
    """Tokens of each row of SFT, prompt included."""
    tokenizer: Any = load_tokenizer(str(model))
    how: dict[str, Any] = {"grpo_rows": GRPO_ROWS, "held_out": HELD_OUT, "sandbox": "namespaces"}
    rows = map(json.loads, retool.make_rows(seed=seed, arm=arm, sft_rows=sft_rows, **how)["sft"])  # type: ignore[arg-type]
    return [_length(tokenizer, row) for row in rows]


def _length(tokenizer: Any, row: Mapping[str, Any]) -> int:
    turns = row.get("messages") or [*row["prompt"], {"role": "assistant", "content": row["completion"]}]
    tools = {"tools": row["tools"]} if "tools" in row else {}
    return len(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, **tools)["input_ids"])


def as_many(lengths: Sequence[int], tokens: int) -> int:
    """How many rows from the first on have at most so many tokens; one at least."""
    count = total = 0
    for length in lengths:
        total += length
        if total > tokens:
            break
        count += 1
    return max(1, count)


def steps_in(seconds: float, times: Sequence[float]) -> int:
    """Steps that take about so long, by the median of `times`; one at least."""
    return max(1, round(seconds / statistics.median(times)))


def run_all(arms: Sequence[str], seeds: Sequence[int], work: Path, output: Path) -> None:
    """Run what is not in `output` yet, seed by seed, the tool first."""
    for seed in seeds:
        for arm in sorted(arms, reverse=True):
            rows = {(row["arm"], row["seed"]): row for row in read_rows(output)}
            if (arm, seed) in rows:
                continue
            folder = work / f"{arm}_{seed}"
            if arm == "tool":
                run(command(folder, arm, seed, SFT_ROWS, STEPS, HELD_OUT))
                tokens = sum(tokens_of(arm, seed, SFT_ROWS, folder / "model"))
            else:
                if (tool := rows.get(("tool", seed))) is None:
                    raise UserError(f"--arms text: no line of the tool with seed {seed} in {output}; run it before")
                tokens = text_run(folder, seed, tool)
            add_row(output, row_of(folder, tokens))


def text_run(folder: Path, seed: int, tool: Mapping[str, Any]) -> int:
    """The arm in writing, with as many tokens as the tool's and as much time; returns its tokens of SFT."""
    probes = {arm: folder.with_name(f"{folder.name}_probe_{arm}") for arm in ARMS}
    for arm, probe in probes.items():
        run(command(probe, arm, seed, SFT_ROWS, PROBE, 1))
    lengths = tokens_of("text", seed, 4 * SFT_ROWS, probes["text"] / "model")
    rows = as_many(lengths, tool["sft_tokens"])
    steps = steps_in(tool["steps"] * statistics.median(step_times(probes["tool"])), step_times(probes["text"]))
    run(command(folder, "text", seed, rows, steps, HELD_OUT))
    return sum(lengths[:rows])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each run, in percent; below it what GRPO has over SFT, and the tool over writing."""
    heads = ("arm", "seed", "avg@8: base", "SFT", "GRPO", "greedy: base", "SFT", "GRPO", "GRPO steps", "minutes")
    lines = []
    for row in sorted(rows, key=lambda row: (row["arm"], row["seed"])):
        found = [row[stage].get(metric) for metric in ("avg@8", "greedy") for stage in real.STAGES]
        scores = ["–" if score is None else f"{100 * score:.1f}" for score in found]  # of a stage that was not scored
        lines.append([row["arm"], str(row["seed"]), *scores, str(row["steps"]), f"{row['wall_s'] / 60:.0f}"])
    return "\n\n".join([markdown(heads, lines), *comparisons(rows)])


def comparisons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each arm of what GRPO has over its own SFT, and one of the tool's lead at the same seed."""
    by_run = {(row["arm"], row["seed"]): row for row in rows}
    lines = []
    for arm in ARMS:
        gains = [row["grpo"]["avg@8"] - row["sft"]["avg@8"] for row in rows if row["arm"] == arm]
        lines.append(_mean(f"GRPO over SFT, {arm}", gains))
    seeds = [seed for arm, seed in by_run if arm == "tool" and ("text", seed) in by_run]
    leads = [by_run["tool", seed]["grpo"]["avg@8"] - by_run["text", seed]["grpo"]["avg@8"] for seed in seeds]
    return [line for line in (*lines, _mean("The tool's lead after GRPO", leads)) if line]


def _mean(what: str, differences: Sequence[float]) -> str:
    """The mean over seeds and its interval by Student's t; "" below two of them."""
    if len(differences) < 2:
        return ""
    points = [100 * each for each in differences]
    mean, reach = statistics.mean(points), seeds_reach(points)
    return f"{what}, avg@8: {mean:+.1f} points [{mean - reach:+.1f}, {mean + reach:+.1f}]."


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "retool", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true", help="only print the table")
    return parser


@report_errors()
def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    arms = args.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms {unknown[0]}: {' and '.join(ARMS)} are there")
    if not all(seed.isdecimal() for seed in args.seeds.split(",")):
        parser.error(f"--seeds {args.seeds}: write whole numbers with commas between")
    if not args.show:
        with stopped_by_signals("the same command goes on"):
            run_all(arms, [int(seed) for seed in args.seeds.split(",")], args.work, args.output)
    print(table(read_rows(args.output)))


if __name__ == "__main__":
    main()
