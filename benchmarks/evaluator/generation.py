"""Generation after start-up: the evaluator's workers against raw `LLM.generate`, on one core's engine and on two.

A raw engine compiles its model; on a CPU the evaluator does so on request alone, so it is asked to: the start is not
measured here.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evaluator.ours import Flags, Run, evaluate, rows_of
from benchmarks.evaluator.raw import RawEngine, Turn, work_of
from perl.records import Sample

COMPILED: Flags = {"enforce_eager": "false"}


def measure_one(flags: Flags, folder: Path, pairs: int) -> dict[str, Any]:
    """raw_vllm_ratio: tokens/s of --dp_size 1 over those of one raw engine, interleaved."""
    rows = rows_of(flags)
    ratios, rates, starts = [], {"ours": [], "raw": []}, []
    with RawEngine(work_of(flags["model"], rows, None), folder, "raw") as engine:
        engine.read()
        for pair in range(pairs):
            turn, run = None, None
            for side in ("raw", "ours") if pair % 2 == 0 else ("ours", "raw"):
                if side == "raw":
                    turn = engine.turn()
                else:
                    run = evaluate(flags | COMPILED, folder / f"dp1-{pair}")
            assert turn is not None
            assert run is not None
            rates["raw"].append(turn.tokens / turn.wall_s)
            rates["ours"].append(run.generation["tokens_per_s"])
            ratios.append(rates["ours"][-1] / rates["raw"][-1])
            starts.append(run.wall_s - run.generation["wall_s"])
            same = share_of_equal(run, [(rows, turn)])
            print(
                f"one engine, pair {pair}: raw {rates['raw'][-1]:,.0f} tokens/s, ours {rates['ours'][-1]:,.0f}"
                f" ({ratios[-1]:.3f}), {turn.tokens} tokens in {turn.wall_s:.1f} s, {same:.1%} of completions equal;"
                f" our command {run.wall_s:.1f} s, the engine's start {run.generation['start_s']:.1f} s of them",
                flush=True,
            )
    return {
        "raw_vllm_ratio": round(statistics.median(ratios), 3),
        "raw_tokens_per_s": round(statistics.median(rates["raw"])),
        "dp1_tokens_per_s": round(statistics.median(rates["ours"])),
        "dp1_before_and_after_s": round(statistics.median(starts), 1),
    }


def measure_two(flags: Flags, folder: Path, pairs: int) -> dict[str, Any]:
    """dp2_ratio: tokens/s of --dp_size 2 over those of two raw engines at work together, each pinned to one core with
    half the rows; and both against one of these raw engines alone."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("two engines: this process may use one core only; dp2_ratio is left out", flush=True)
        return {}
    rows = rows_of(flags)
    halves = [rows[0::2], rows[1::2]]
    ratios, ours_scale, raw_scale = [], [], []
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(RawEngine(work_of(flags["model"], half, core), folder, f"raw-{core}"))
            for half, core in zip(halves, cores, strict=True)
        ]
        for engine in engines:
            engine.read()
        for pair in range(pairs):
            alone = engines[0].turn()
            together = turns_together(engines)
            run = evaluate(flags | COMPILED | {"dp_size": 2}, folder / f"dp2-{pair}")
            one = alone.tokens / alone.wall_s
            two = sum(turn.tokens for turn in together) / max(turn.wall_s for turn in together)
            ours = run.generation["tokens_per_s"]
            ratios.append(ours / two)
            ours_scale.append(ours / one)
            raw_scale.append(two / one)
            same = share_of_equal(run, list(zip(halves, together, strict=True)))
            print(
                f"two engines, pair {pair}: one raw {one:,.0f} tokens/s, two raw {two:,.0f} ({two / one:.2f}), ours"
                f" {ours:,.0f} ({ours / one:.2f}), ratio {ours / two:.3f}, {same:.1%} of completions equal",
                flush=True,
            )
    return {
        "dp2_ratio": round(statistics.median(ratios), 3),
        "dp2_scaling": round(statistics.median(ours_scale), 3),
        "raw_scaling": round(statistics.median(raw_scale), 3),
    }


def turns_together(engines: Sequence[RawEngine]) -> list[Turn]:
    for engine in engines:
        engine.begin()
    return [Turn(**engine.read()) for engine in engines]


def share_of_equal(run: Run, raw: Sequence[tuple[Sequence[Sample], Turn]]) -> float:
    """Share of the rows to which both sides gave the same text."""
    mine = {(record["key"], record["sample"]): record["completion"] for record in run.records}
    theirs = {(row.key, row.index): text for rows, turn in raw for row, text in zip(rows, turn.texts, strict=True)}
    return sum(mine[row] == text for row, text in theirs.items()) / len(theirs)
