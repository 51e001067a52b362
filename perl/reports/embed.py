"""The values of a training's steps, and samples, as they stand in the page.

Samples stand there as columns, deflated, in base64, in pieces that a browser reads one after another. A piece is data,
never markup: base64 has no character that HTML could take for a tag. What stands in the page as plain JSON goes through
jinja's filter tojson, which escapes such characters.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from perl.reports.charts import Line
from perl.reports.results import Run
from perl.scoring.results import SampleRecord, ScoredSet

logger = logging.getLogger(__name__)

common_start = os.path.commonprefix  # of characters, whatever its name says
PIECE_CHARACTERS = 2_000_000
"""Text in one piece, about: a browser reads it within a frame or two."""
MOST_CHARACTERS = 256_000_000
"""Completions in one page; beyond it a browser's memory ends before the reader's patience."""


def deflated(value: Any) -> str:
    """JSON, zlib, base64. A lone surrogate, which JSON may hold, reaches the browser as U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 6)).decode("ascii")


def columns(lines: Sequence[Line]) -> dict[str, Any]:
    """What steps.js reads, {"step": […], "values": {metric: [a value or null for each step]}}: every step of any line;
    values to five significant digits."""
    steps = sorted({step for line in lines for step, _ in line.points})
    points = {line.metric: dict(line.points) for line in lines}
    values = {name: [float(f"{v[s]:.5g}") if s in v else None for s in steps] for name, v in points.items()}
    return {"step": steps, "values": values}


def pieces(runs: Sequence[Run]) -> Iterator[str]:
    """Every run's problems and samples as deflated pieces: `problems` before the `samples` that refer to them. Runs
    with the same prompt for a problem share it.

    {"problems": {"dataset": name, "head": …, "tail": … (shared_ends), "key": […], "prompt": […], "gold": […], …}}
    {"samples": {"dataset": name, "run": index, "problem": [index among the dataset's problems], "completion": […], …}}
    """
    records = [record for run in runs for scored in run.scored for record in scored.records]
    limit = longest_that_fits([len(text) for record in records for text in texts_of(record)])
    known: dict[str, dict[tuple[str, str], int]] = {}
    for number, run in enumerate(runs):
        for scored in run.scored:
            index = known.setdefault(scored.dataset, {})
            fresh: dict[tuple[str, str], SampleRecord] = {}
            for record in scored.records:
                if problem_of(record) not in index:
                    fresh.setdefault(problem_of(record), record)
            ends = shared_ends(scored) if fresh else (0, 0)
            for batch in batches(list(fresh.values()), lambda record: len(record["prompt"])):
                yield deflated({"problems": problem_columns(scored.dataset, ends, batch)})
                index |= {problem_of(record): len(index) + i for i, record in enumerate(batch)}
            for batch in batches(scored.records, lambda record: sum(map(len, texts_of(record)))):
                columns = sample_columns(scored.dataset, number, index, batch, limit)
                yield deflated({"samples": columns | compared_columns(run, scored.dataset, batch)})


def problem_of(record: SampleRecord) -> tuple[str, str]:
    return record["key"], record["prompt"]


def problem_columns(dataset: str, ends: tuple[int, int], records: Sequence[SampleRecord]) -> dict[str, Any]:
    names = ("key", "prompt", "gold", "source", "task", "prompt_tokens")
    head, tail = ends
    return {"dataset": dataset, "head": head, "tail": tail} | {name: [r[name] for r in records] for name in names}


def sample_columns(
    dataset: str, run: int, index: dict[tuple[str, str], int], records: Sequence[SampleRecord], limit: int
) -> dict[str, Any]:
    names = ("sample", "score", "scores", "extracted", "reason", "tokens", "finish_reason", "error", "time")
    return {
        "dataset": dataset,
        "run": run,
        "problem": [index[problem_of(r)] for r in records],
        "completion": [shortened(r["completion"], limit) for r in records],
        "turns": [turns_of(r, limit) for r in records],
        "seed": [str(r["seed"]) for r in records],  # of 63 bits, and a number of JavaScript holds 53
    } | {name: [r[name] for r in records] for name in names}


def compared_columns(run: Run, dataset: str, records: Sequence[SampleRecord]) -> dict[str, Any]:
    """Each row's problem's mean score (there, here) where the run's comparison found another one, else null."""
    paired = run.comparison.datasets.get(dataset) if run.comparison else None
    return {"changed": [paired.changed.get(r["key"]) for r in records]} if paired else {}


def turns_of(record: SampleRecord, limit: int) -> list[tuple[str, str]] | None:
    """(who, what) of all that was said in a conversation, a call as its JSON; None: it was none."""
    if "conversation" not in record:
        return None
    said = []
    for message in record["conversation"]["messages"]:
        who, content = str(message.get("role")), message.get("content")
        calls = [call.get("function") for call in message.get("tool_calls") or ()]
        if content or not calls:
            said.append((who, shortened(str(content or ""), limit)))
        said += [("call", shortened(json.dumps(call, ensure_ascii=False), limit)) for call in calls]
    return said


def texts_of(record: SampleRecord) -> list[str]:
    """What a sample shows."""
    said = turns_of(record, sys.maxsize)
    return [record["completion"]] if said is None else [text for _, text in said]


def batches(records: Sequence[SampleRecord], length: Callable[[SampleRecord], int]) -> Iterator[Sequence[SampleRecord]]:
    """Runs of records whose lengths come to about PIECE_CHARACTERS."""
    start = size = 0
    for end, record in enumerate(records, start=1):
        size += length(record) + 200
        if size >= PIECE_CHARACTERS or end == len(records):
            yield records[start:end]
            start, size = end, 0


def longest_that_fits(lengths: Sequence[int]) -> int:
    """The largest number of characters that completions may keep for all of them to come to at most
    MOST_CHARACTERS."""
    left = MOST_CHARACTERS
    for place, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - place)
        if length > share:
            logger.warning(
                "report: completions longer than %d characters are shortened in the middle, %d of %d;"
                " samples.jsonl has them whole", share, len(lengths) - place, len(lengths),
            )  # fmt: skip
            return share
        left -= length
    return max(lengths, default=0)


def shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 2], text[len(text) - limit // 2 :]
    return f"{head}\n\n[… {len(text) - limit} characters are left out here; samples.jsonl has them …]\n\n{tail}"


def shared_ends(scored: ScoredSet) -> tuple[int, int]:
    """How many characters, as JavaScript counts them (UTF-16), at the beginning and at the end are the same in all
    prompts: template and examples, with the question between them. Cut at the end of a line or of a special token, so
    that no word is torn."""
    prompts = list(dict.fromkeys(record["prompt"] for record in scored.records))
    if len(prompts) < 2:
        return 0, 0
    head = common_start(prompts)
    head = head[: max(head.rfind("\n"), head.rfind(">")) + 1]
    tail = common_start([prompt[len(head) :][::-1] for prompt in prompts])[::-1]
    starts = [place for mark in ("\n", "<") if (place := tail.find(mark)) >= 0]
    return utf16_units(head), utf16_units(tail[min(starts) :]) if starts else 0


def utf16_units(text: str) -> int:
    return len(text.encode("utf-16-le", errors="surrogatepass")) // 2
