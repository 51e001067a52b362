"""What does staleness cost? The quickstart's training with completions of older and older weights, over several seeds.

    python -m benchmarks.staleness [--arms "lag 0;lag 8, token"] [--seeds 1,2,3,4,5,6,7,8] [--steps 160]
    python -m benchmarks.staleness --real outputs/real_1 [outputs/real_2 ...] --output FILE [--arms ...] [--steps 80]
    python -m benchmarks.staleness --draw

An arm is a lag (`rollout.lag`: a batch, which is a step here, is drawn by the weights of so many steps before) and
what the loss makes of it: none, token (each token's ratio, cut: TIS), token_mask (0 above the cut: MIS), exact (token,
by the trainer's own log-probabilities of the weights that drew). Lag 0 is trained without workers, in pieces of
PIECE, which is the same run bit for bit as one with workers. 160 steps are ten of the largest lag.

Each run adds a line of JSON to --output (docs/results/staleness.jsonl): arm, lag, correction, noise, seed, flags,
versions, reward, entropy and KL(sampler, trainer) of each step, scores on held-out problems at temperature 1, seconds
and CPU-seconds. A run that stands there is not repeated, so that the list can be worked off in parts. `--draw` writes
the tables in docs/staleness.md and the curves assets/staleness_quickstart.svg, and prints what token has over none.

--real trains the second stage of `python -m perl real`, from the adapter that SFT left in those folders, in the place
of the quickstart.

The tables give means over seeds with Student's t intervals of 95 %, and the mean difference from lag 0 (with the same
noise) at the same seed with the p-value of a paired t-test, two-sided and not corrected for the number of arms.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks._learning import (
    Row,
    Start,
    chosen,
    core_hours,
    difference_of,
    learn_all,
    markdown,
    mean_of,
    panels,
    parser_of,
    rows_to_draw,
    starts_of,
    write_between,
)
from perl.base.errors import report_errors
from perl.tools.stages import ROOT

RESULTS = ROOT / "docs" / "results" / "staleness.jsonl"
PAGE = ROOT / "docs" / "staleness.md"
CURVES = ROOT / "assets" / "staleness_quickstart.svg"
PIECE = 16
"""Completions that are decoded together: a quarter of the recipe's batch."""
Correction = Literal["none", "token", "token_mask", "exact"]


@dataclass(frozen=True, slots=True)
class Arm:
    lag: int
    correction: Correction = "none"
    noise: bool = True
    """Of the recipe: AQN."""

    def __str__(self) -> str:
        corrected = "" if self.lag == 0 and self.correction == "none" else f", {self.correction}"
        return f"lag {self.lag}{corrected}{'' if self.noise else ', no noise'}"

    @property
    def columns(self) -> dict[str, object]:
        return {"lag": self.lag, "correction": self.correction, "noise": self.noise}

    def settings(self, start: Start) -> dict[str, object]:
        exact = self.correction == "exact"
        settings: dict[str, object] = {"rollout.piece_size": PIECE}
        settings |= {"rollout.workers": 1, "rollout.lag": self.lag} if self.lag else {}
        if self.lag or self.correction != "none":
            settings["rollout.importance_correction"] = "token" if exact else self.correction
        settings |= {"rollout.behaviour": "exact"} if exact else {}
        return settings | ({} if self.noise else {"noise_injection.enabled": "false"})


LAGS = (16, 4, 8, 2, 1)
ORDER = (
    Arm(0),
    *(Arm(lag, correction) for lag in LAGS for correction in ("none", "token", "token_mask")),
    *(Arm(lag, correction, noise=False) for lag in (0, 16) for correction in ("none", "token")),
    *(Arm(lag, "exact") for lag in LAGS),
)
"""As they are trained: what is asked first comes first."""
ARMS = {str(arm): arm for arm in sorted(ORDER, key=lambda arm: (not arm.noise, arm.lag))}


CORRECTIONS: tuple[Correction, ...] = get_args(Correction)


def late(row: Row, lag: int) -> Row:
    """The run as it would be if its batches were drawn by older weights, and it learned from them all the same: what
    its reward loses by the delay alone."""
    return {**row, "reward": [row["reward"][max(0, step - lag)] for step in range(len(row["reward"]))]}


def table(results: Sequence[Row], measure: str) -> str:
    """Markdown: a row for each lag, a column for each correction, and of rewards one for lag 0's own, so many steps
    `late`; in a cell the mean, what it has over lag 0, and the number of its seeds where lag 0 has more.

    Args:
        measure: accuracy or reward (benchmarks._learning.MEASURES).
    """
    by_arm = {arm: [row for row in results if row["arm"] == str(arm)] for arm in ORDER}
    heads = ["lag", *CORRECTIONS, *(["lag 0, late"] if measure == "reward" else [])]
    lines = []
    for noise in (True, False):
        base = by_arm[Arm(0, noise=noise)]
        for lag in sorted({0, *LAGS}):
            cells = []
            for correction in CORRECTIONS:
                runs = by_arm.get(arm := Arm(lag, correction, noise), [])
                over = difference_of(runs, base, measure) if arm != Arm(0, noise=noise) else ""
                fewer = f"n={len(runs)}" if len(runs) < len(base) else ""
                cells.append(", ".join(filter(None, [mean_of(runs, measure), over, fewer])) if runs else "")
            if measure == "reward" and lag and base and any(cells):
                delayed = [late(row, lag) for row in base]
                cells.append(f"{mean_of(delayed, measure)}, {difference_of(delayed, base, measure)}")
            if any(cells):
                cells += [""] * (len(heads) - 1 - len(cells))
                lines.append([f"{lag}{'' if noise else ', no noise'}", *cells])
    return markdown(heads, lines)


def draw(results: Sequence[Row]) -> None:
    for measure in ("accuracy", "reward"):
        write_between(PAGE, f"staleness-{measure}", table(results, measure))
    curves = {arm: [row["reward"] for row in results if row["arm"] == arm] for arm in ARMS}
    CURVES.write_text(panels({arm: several for arm, several in curves.items() if several}, mean=True), encoding="utf-8")
    for lag in LAGS:
        none, token = ([row for row in results if row["arm"] == str(Arm(lag, each))] for each in ("none", "token"))
        over = (f"{measure} {difference_of(token, none, measure)}" for measure in ("accuracy", "reward"))
        print(f"lag {lag}, token over none: {', '.join(over)}")
    print(core_hours(results))


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, {str(arm): arm for arm in ORDER}, RESULTS)
    parser.add_argument("--real", type=Path, nargs="+", help="folders of `python -m perl real`")
    parser.set_defaults(steps=160)
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
