"""--rescore: grade the completions of a result folder again, with today's rules. It needs no model."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, defaultdict
from dataclasses import fields
from pathlib import Path
from typing import cast

from rich.console import Console

from perl.base.errors import UserError, lookup
from perl.base.files import read_json, write_json
from perl.base.provenance import provenance
from perl.config.evaluation import EvalConfig
from perl.evaluation.store import GRADING_HASH, Store, locked
from perl.evaluation.tables import print_sweep, print_table
from perl.grading import Grader, rules_hash
from perl.scoring.results import AGAIN, RUN, SAMPLES, SUMMARY, SWEEP, Identity, SampleRecord, Summary, Sweep
from perl.scoring.samples import rewarded
from perl.scoring.summary import grading_of, summarize
from perl.tasks import TASKS

logger = logging.getLogger(__name__)

BATCH = 1024
LISTED = 5
"""Changed verdicts that are shown."""


def rescore(config: EvalConfig) -> None:
    """Grade every stored completion below `config.result_dir` again; replace samples.jsonl and the summaries."""
    result_dir, console = Path(config.result_dir), Console()
    defaults = EvalConfig(model="", dataset="")
    given = [
        f"--{f.name}" for f in fields(config) if getattr(config, f.name) not in (getattr(defaults, f.name), "", None)
    ]
    if unused := [flag for flag in given if flag not in ("--rescore", "--result_dir")]:
        logger.warning("--rescore grades all that lies in --result_dir; not read: %s", " ".join(unused))
    files = sorted([*result_dir.glob(f"*/{SAMPLES}"), *result_dir.glob(f"*/*/{SAMPLES}")])
    if not files:
        raise UserError(f"--result_dir {result_dir}: holds no results to grade (no DATASET/samples.jsonl)")
    with contextlib.ExitStack() as locks, Grader() as grader:
        for folder in dict.fromkeys([result_dir, *(file.parent.parent for file in files)]):
            locks.enter_context(locked(folder))
        for file in files:
            identity = dict(read_json(file.parent / RUN, kind=Identity)) | {GRADING_HASH: rules_hash()}
            store = Store(file.parent, {name: value for name, value in identity.items() if name != GRADING_HASH})
            before = list(store.records.values())
            after = regrade(before, grader)
            store.replace(after)
            write_json(file.parent / RUN, identity)
            changed = [(a, b) for a, b in zip(before, after, strict=True) if a["score"] != b["score"]]
            _tell(str(file.parent.relative_to(result_dir)), len(after), changed, console)
            refresh(file.parent, after, len(changed), console)
        _refresh_tables(result_dir, console)


def regrade(records: list[SampleRecord], grader: Grader) -> list[SampleRecord]:
    """The same records in the same order with today's verdicts; one that no task grades keeps its environment's."""
    regraded: list[SampleRecord] = list(records)
    by_task: dict[str, list[int]] = defaultdict(list)
    for place, record in enumerate(records):
        if record["gold"] and record["task"]:
            by_task[record["task"]].append(place)
    for task, places in by_task.items():
        rubric = lookup(TASKS, task, "task", "samples.jsonl").rubric
        for start in range(0, len(places), BATCH):
            batch = places[start : start + BATCH]
            texts, golds = ([records[place][name] for place in batch] for name in ("completion", "gold"))
            for place, grade in zip(batch, grader.grade(rubric, texts, golds), strict=True):
                talked = records[place].get("conversation")
                verdict = rewarded(grade, talked["reward"] if talked else None)
                regraded[place] = cast("SampleRecord", {**records[place], **verdict.as_dict()})
    return regraded


def refresh(folder: Path, records: list[SampleRecord], changed: int, console: Console) -> None:
    """Compute summary.json, if there is one, again over the problems that are complete; what tells how the rows were
    made stays."""
    file = folder / SUMMARY
    if not file.is_file():
        console.print("  not finished, so without a summary; the command that began it goes on", highlight=False)
        return
    before = read_json(file, hint=AGAIN, kind=Summary)
    n = before["n"]
    by_key: dict[str, list[SampleRecord]] = defaultdict(list)
    for record in records:
        if record["sample"] < n:
            by_key[record["key"]].append(record)
    whole = [record for group in by_key.values() if len(group) == n for record in group]
    if not whole:
        raise UserError(f"{folder / SAMPLES}: holds no whole problem; {AGAIN}")
    if len(whole) != before["samples"]:
        problems = len(whole) // n
        console.print(f"  the summary now covers {problems} problems, before {before['problems']}", highlight=False)
    grading = grading_of(before["tasks"])
    rescored = {"changed": changed, "provenance": provenance()}
    summary = {**before} | summarize(whole, n) | {"grading": grading, GRADING_HASH: rules_hash(), "rescored": rescored}
    write_json(file, summary)


def _tell(name: str, count: int, changed: list[tuple[SampleRecord, SampleRecord]], console: Console) -> None:
    kinds = Counter((a["reason"], b["reason"]) for a, b in changed)
    how = ": " + ", ".join(f"{n} from {a} to {b}" for (a, b), n in kinds.most_common()) if kinds else ""
    console.print(f"{name}: {count} completions graded again, {len(changed)} verdicts changed{how}", highlight=False)
    for a, b in changed[:LISTED]:
        console.print(
            f"  {b['source'] or b['key']}, sample {b['sample']}: gold {b['gold']!r}, read {a['extracted']!r} before,"
            f" {b['extracted']!r} now: {a['reason']} -> {b['reason']}",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip


def _refresh_tables(result_dir: Path, console: Console) -> None:
    """Write the tables above the datasets again: each candidate's summary.json, and sweep.json."""
    for file in sorted([*result_dir.glob(SUMMARY), *result_dir.glob(f"*/{SUMMARY}")]):
        if not (file.parent / RUN).is_file():  # a dataset's own is done
            datasets = [(name, file.parent / name / SUMMARY) for name in read_json(file)]
            summaries = {
                name: read_json(inner, hint=AGAIN, kind=Summary) for name, inner in datasets if inner.is_file()
            }
            write_json(file, summaries)
            if file.parent == result_dir and summaries:
                print_table(summaries, console)
    if (result_dir / SWEEP).is_file():
        sweep = read_json(result_dir / SWEEP, hint=AGAIN, kind=Sweep)
        for entry in sweep["candidates"]:
            if entry["metrics"] is not None:
                summaries = read_json(result_dir / entry["name"] / SUMMARY, hint=AGAIN, kind=dict[str, Summary])
                entry["metrics"] = {name: summary["metrics"] for name, summary in summaries.items()}
        write_json(result_dir / SWEEP, sweep)
        print_sweep(sweep["candidates"], console)
