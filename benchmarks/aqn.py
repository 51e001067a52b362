"""What does AQN do? The same training without noise and with each schedule, over several seeds.

    python -m benchmarks.aqn [--arms "none;linear, clean"] [--seeds 1,2,3,4,5,6,7,8] [--steps 60]
    python -m benchmarks.aqn --real outputs/real_1 [outputs/real_2 ...] [--arms ...]
    python -m benchmarks.aqn --draw

The first trains the quickstart. The second trains the second stage of `python -m perl real` once more for each arm,
from the adapter that SFT left in those folders, whose seeds it takes. Each run adds a line of JSON to --output
(docs/results/aqn.jsonl): model, arm, seed, flags, versions, reward, entropy and sigma of each step, and the scores on
held-out problems at temperature 1. A run that stands there is not repeated, so that the list can be worked off in
parts, by several commands at once too. Runs of another number of steps need a file of their own. `--draw` writes, of
each model in --output, the table in docs/aqn.md and the curves assets/aqn_MODEL_STEPS.svg.

The table gives means over seeds with Student's t intervals of 95 %, and for each arm the mean difference from `none`
at the same seed with the p-value of a paired t-test (two-sided, not corrected for the number of arms).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks._learning import (
    MEASURES,
    SCHEDULES,
    Row,
    Start,
    chosen,
    difference_of,
    learn_all,
    markdown,
    mean_of,
    noise_settings,
    panels,
    parser_of,
    rows_to_draw,
    starts_of,
    write_between,
)
from perl.base.errors import report_errors
from perl.tools.stages import ROOT

RESULTS = ROOT / "docs" / "results" / "aqn.jsonl"
PAGE = ROOT / "docs" / "aqn.md"


@dataclass(frozen=True, slots=True)
class Arm:
    kind: str | None = None
    """Of SCHEDULES; None: no noise."""
    old_logps: Literal["clean", "noisy"] = "clean"

    def __str__(self) -> str:
        return f"{self.kind}, {self.old_logps}" if self.kind else "none"

    @property
    def columns(self) -> dict[str, object]:
        return {}

    def settings(self, start: Start) -> dict[str, object]:
        return noise_settings(self.kind, start, self.old_logps)


ORDER = (Arm(), *(Arm(kind, "clean") for kind in SCHEDULES), *(Arm(kind, "noisy") for kind in SCHEDULES))
ARMS = {str(arm): arm for arm in ORDER}

# Drawing

HEADS = ("arm, old_logps", "seeds", "at temperature 1, %", "pass@8, %", "mean reward over all steps",
         "entropy at the end", "points over none (p)", "mean reward over none (p)")  # fmt: skip


def table(results: Sequence[Row], heads: Sequence[str]) -> str:
    """Markdown: a row for each arm."""
    by_arm = {arm: [row for row in results if row["arm"] == arm] for arm in ARMS}
    lines = []
    for arm, runs in by_arm.items():
        if runs:
            base = by_arm["none"] if arm != "none" else []
            cells = [arm, str(len(runs)), *(mean_of(runs, name) for name in MEASURES)]
            lines.append([*cells, *(difference_of(runs, base, name) for name in ("accuracy", "reward"))])
    return markdown(heads, lines)


def draw(results: Sequence[Row]) -> None:
    for model in sorted({row["model"] for row in results}):
        rows = [row for row in results if row["model"] == model]
        steps = len(rows[0]["reward"])
        write_between(PAGE, f"aqn-{model}-{steps}", table(rows, HEADS))
        curves = {arm: [row["reward"] for row in rows if row["arm"] == arm] for arm in ARMS}
        found = {arm: several for arm, several in curves.items() if several}
        (ROOT / "assets" / f"aqn_{model}_{steps}.svg").write_text(panels(found, mean=True), encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, ARMS, RESULTS)
    parser.add_argument("--real", type=Path, nargs="+", help="folders of `python -m perl real`")
    return parser


@report_errors()
def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.draw:
        draw(rows_to_draw(args.output))
        return
    learn_all(starts_of(args), chosen(parser, args, ARMS), args.steps, args.output, runs=args.runs)


if __name__ == "__main__":
    main()
