"""--report_to wandb: the scores of an evaluation in the W&B run of the training that made the adapter, or the model."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from perl.base.paths import user_path
from perl.base.redact import drop_secrets
from perl.base.tracking import WandbRun, hide_from_wandb, require_trackers, wandb_is_disabled, wandb_mode
from perl.config.evaluation import EvalConfig
from perl.evaluation.candidates import Candidate
from perl.scoring.summary import logged

logger = logging.getLogger(__name__)

FLAG = "--report_to"
COLUMNS = ["adapter", "step", "dataset", "metric", "value", "low", "high", "problems", "n", "engine"]


def check_tracker(config: EvalConfig) -> None:
    """Raise a UserError where the tracker's package is not installed."""
    if config.report_to != "none" and not wandb_is_disabled():
        require_trackers([config.report_to], FLAG)


def log_results(
    config: EvalConfig, candidates: Sequence[Candidate], summaries: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> None:
    """Log the summaries of all scored candidates, each to the W&B run of its training.

    A run gets, for each dataset (`scored_as`) and metric, `eval/DATASET/METRIC` and its `…/low` and `…/high`, in a
    sweep as a curve over train/global_step, and the table `eval/results`. The run's summary holds the values of the
    last candidate.
    Values are shares, as in summary.json. W&B's own failures are one line: the results are on disk.

    Args:
        summaries: candidate's name -> dataset -> summary.
    """
    if config.report_to == "none":
        return
    if wandb_is_disabled():
        logger.warning("WANDB_DISABLED is set: nothing is sent to W&B")
        return
    scored = [candidate for candidate in candidates if candidate.name in summaries]
    trained = {candidate.name: candidate.adapter for candidate in scored if candidate.adapter is not None}
    runs = {name: training_run(folder) for name, folder in trained.items()}
    if not trained:  # a whole model lies in the folder of its training
        runs = {candidate.name: training_run(user_path(config.model)) for candidate in scored}
    only = next(iter(runs.values())) if len(set(runs.values())) == 1 else None
    members: dict[WandbRun | None, list[Candidate]] = {}
    for candidate in scored:  # the base belongs to the sweep's training, if that is one
        members.setdefault(runs.get(candidate.name, only), []).append(candidate)
    hide_from_wandb()
    wandb = importlib.import_module("wandb")  # not at the top: it takes a second, and few evaluations need it
    for run, candidates_of_run in members.items():
        try:
            log_to(wandb, run, config, candidates_of_run, summaries)
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            logger.error(
                "W&B took no results (%s); they are in %s, the same command logs them", reason, config.result_dir
            )


def training_run(trained: Path) -> WandbRun | None:
    """The run that the training's folder names: the adapter's or the model's folder, or the one that it lies in."""
    folder = trained.resolve()
    return WandbRun.read(folder) or WandbRun.read(folder.parent)


def log_to(
    wandb: ModuleType,
    run: WandbRun | None,
    config: EvalConfig,
    candidates: Sequence[Candidate],
    summaries: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> None:
    """Log to `run`, or to a new one where it is None, saying which."""
    name = Path(config.result_dir).resolve().name
    mode = wandb_mode()
    where: dict[str, Any] = {"dir": os.environ.get("WANDB_DIR", config.result_dir), "mode": mode}
    if run is None:
        what = "a new run, since no training's run is known (no wandb_run.json at the adapter)"
        where |= {
            "project": os.environ.get("WANDB_PROJECT", "perl-eval"),
            "name": name,
            "config": drop_secrets(asdict(config)),
        }
    else:
        what = "the training's run"
        where |= {"id": run.id, "project": run.project, "entity": run.entity}
        where |= {"resume": "allow"} if mode == "online" else {}  # offline, wandb sync appends to the run of this id
    with wandb.init(**where) as opened:
        logger.info("W&B is %s: results go to %s, %s/%s", mode, what, opened.project, opened.id)
        opened.define_metric("train/global_step")
        opened.define_metric("eval/*", step_metric="train/global_step")
        for candidate in candidates:
            at = {} if candidate.step is None else {"train/global_step": candidate.step}
            opened.log({**values(summaries[candidate.name]), **at})
        rows = [row for candidate in candidates for row in table_rows(candidate, summaries[candidate.name])]
        opened.log({"eval/results": wandb.Table(columns=COLUMNS, data=rows)})


def values(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """eval/DATASET/METRIC, and the ends of its 95 % interval."""
    logged = {}
    for dataset, summary in summaries.items():
        for metric, estimate in logged_metrics(summary):
            name = f"eval/{scored_as(dataset, summary)}/{metric}"
            logged[name] = estimate["value"]
            logged |= {f"{name}/{end}": estimate[end] for end in ("low", "high")}
    return logged


def scored_as(dataset: str, summary: Mapping[str, Any]) -> str:
    """With --quantization DATASET/int8: another policy's scores are other curves of the same run."""
    return "/".join(filter(None, (dataset, summary.get("quantization"))))


def table_rows(candidate: Candidate, summaries: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """One row for each dataset and metric, in the order of COLUMNS."""
    adapter = str(candidate.adapter) if candidate.adapter is not None else "base"
    rows = []
    for dataset, summary in summaries.items():
        made = (summary["problems"], summary["n"], ", ".join(summary["engines"]))
        for metric, estimate in logged_metrics(summary):
            interval = (estimate["value"], estimate["low"], estimate["high"])
            rows.append([adapter, candidate.step, scored_as(dataset, summary), metric, *interval, *made])
    return rows


def logged_metrics(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    """accuracy (which is avg@n, under a name that is the same for every n), pass@k and maj@k."""
    names = ["accuracy", *(name for name in logged(summary["metrics"]) if not name.startswith("avg@"))]
    return [(name, summary["metrics"][name]) for name in names]
