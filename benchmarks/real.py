"""Does GRPO learn on a pretrained model, with each seed? The tables of README.md and docs/real.md.

    python -m benchmarks.real outputs/real_1 [outputs/real_2 ...]
    python -m benchmarks.real --draw

The first adds a line of JSON to docs/results/real.jsonl for each of these folders of `python -m perl real`, whose
stages have all finished: the line that the run ended with, the seconds of its stages, its settings, versions and
commit, and the change by GRPO over SFT, paired by problem, with a 95 % interval. A seed that stands there is replaced;
runs that differ in more than the seed (`--held_out 8`) are not put into one file.
`--draw` writes the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._learning import markdown, rows_to_draw, write_between
from perl.base.errors import UserError, report_errors
from perl.base.files import atomic_write, read_rows
from perl.evaluation.compare import compare
from perl.tools import course
from perl.tools.stages import ROOT

RESULTS = ROOT / "docs" / "results" / "real.jsonl"
SAMPLED = f"avg@{course.SAMPLES}"
STAGES = ("base", "sft", "grpo")
OF_A_SEED = ("seed", "data")
"""Settings of a run in which the seeds differ."""
ENGLISH = ("seed", "avg@8: base", "SFT", "GRPO", "by GRPO", "greedy: base", "SFT", "GRPO", "by GRPO", "minutes")
CHINESE = ("种子", "avg@8：基座", "SFT", "GRPO", "GRPO 提高", "贪心：基座", "SFT", "GRPO", "GRPO 提高", "分钟")
PAGES = {"README.md": ENGLISH, "README_zh.md": CHINESE, "docs/real.md": ENGLISH}
"""Page -> heads of its table."""


def row_of(folder: Path, program: str = "real", further: str = "") -> dict[str, Any]:
    """The line for a list of results of a finished run of `python -m perl PROGRAM`: real, or retool with `further`
    flags."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / course.SETTINGS).read_text(encoding="utf-8"))
    changes = {}
    for name, part in ((SAMPLED, "sampled"), ("greedy", "greedy")):
        found = compare(folder / "after_sft" / part, folder / "after_grpo" / part).datasets["test"]
        mean = next(iter(found.metrics.values()))
        changes[name] = [round(number, 4) for number in (mean.value, mean.low, mean.high)]
    named = folder.absolute()
    named = named.relative_to(ROOT) if named.is_relative_to(ROOT) else Path("outputs", named.name)
    made = json.loads((folder / "after_grpo" / "sampled" / "test" / "summary.json").read_text(encoding="utf-8"))
    provenance = made["provenance"]
    return {
        **result,
        "grpo_over_sft": changes,
        "stages": {row["stage"]: row["seconds"] for row in course.read_stages(folder) if row["finished"]},
        "settings": settings,
        "command": f"python -m perl {program} --output_dir {named} --seed {settings['seed']}{further}",
        "versions": provenance["versions"],
        "git_commit": provenance["git_commit"],
    }


def replaced(rows: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """`rows` with the new one in the place of that seed's, in the order of seeds. A UserError where their settings
    differ in more than the seed and what follows from it."""
    for row in rows:
        own, others = ({k: v for k, v in each["settings"].items() if k not in OF_A_SEED} for each in (new, row))
        if other := [f"{name} {own[name]}, not {others.get(name)}" for name in own if own[name] != others.get(name)]:
            raise UserError(f"seed {new['seed']} is of a run with {'; '.join(other)}; write another --output")
    return sorted([row for row in rows if row["seed"] != new["seed"]] + [new], key=lambda row: row["seed"])


def table(rows: Sequence[Mapping[str, Any]], heads: Sequence[str]) -> str:
    """Markdown: a row for each seed, in percent and points."""
    lines = []
    for row in rows:
        cells = [str(row["seed"])]
        for metric in (SAMPLED, "greedy"):
            cells += [f"{100 * row[stage][metric]:.1f}" for stage in STAGES]
            value, low, high = (100 * bound for bound in row["grpo_over_sft"][metric])
            cells.append(f"{value:+.1f} [{low:+.1f}, {high:+.1f}]")
        lines.append([*cells, f"{row['wall_s'] / 60:.0f}"])
    return markdown(heads, lines)


def draw(rows: Sequence[Mapping[str, Any]]) -> None:
    for page, heads in PAGES.items():
        write_between(ROOT / page, "real", table(rows, heads))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="finished folders of `python -m perl real`")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="only write the tables")
    return parser


@report_errors()
def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if not args.folders and not args.draw:
        parser.error("name finished folders of `python -m perl real`, or write --draw")
    for folder in args.folders:
        if not (folder / "result.json").is_file():
            parser.error(f"{folder}: no result.json in it; name a folder of `python -m perl real` that has finished")
        row = row_of(folder)
        rows = replaced(read_rows(args.output), row)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(args.output) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(json.dumps(row))
    if args.draw:
        draw(rows_to_draw(args.output))


if __name__ == "__main__":
    main()
