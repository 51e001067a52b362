"""The model card of an adapter or a whole model: README.md with the hub's metadata, from what was measured.

    training     write_training_card    at each save: base, data, method, reward over the steps, settings, versions
    evaluation   add_results            `python -m perl card`: scores with their intervals, in the model-index too

The training owns the folders that it writes, so its card replaces TRL's and PEFT's. In a folder of the user's, only
the part between the two marks of the results and the metadata change.
"""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load, try_to_load_from_cache

from perl import __version__
from perl.adapters import title_of as adapter_title
from perl.adapters import with_article
from perl.adapters.applied import APPLIED
from perl.algorithms import ALGORITHMS
from perl.algorithms.titles import algorithm_of, title_of
from perl.base.errors import UserError
from perl.base.files import read_json
from perl.config.peft_fields import reads_of
from perl.config.schema import data_sets
from perl.models.folders import ADAPTER_CONFIG, content_hash, require_adapter
from perl.scoring.results import AGAIN, Summary
from perl.scoring.summary import shown
from perl.tasks import TASKS
from perl.tasks.files import SUFFIXES

log = logging.getLogger(__name__)

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md.j2")
BEGIN, END = "<!-- perl: results -->", "<!-- perl: end of results -->"
NOT_EVALUATED = (
    "Not evaluated yet. `python -m perl card ADAPTER --results RESULT_DIR` writes the evaluator's scores here."
)
UNKNOWN_BASE = "an unknown base"
CURVE_ROWS = 8
"""Steps that the card shows of the reward's curve."""
CURVE = {
    "reward": ".3f",
    "loss": ".4f",
    "mean_token_accuracy": ".3f",
    "reward_std": ".3f",
    "completions/mean_length": ".0f",
    "entropy": ".3f",
    "aqn/sigma": ".3g",
}
"""Metric -> format of its column; a metric that the run did not log has none."""


def write_training_card(
    run_dir: Path, folder: Path, history: Sequence[Mapping[str, Any]], learned: str | None = None
) -> None:
    """Write README.md into `folder`, which holds what the run in `run_dir` has just saved.

    Args:
        run_dir: folder of the run, with its config.yaml and environment.json.
        history: what the trainer has logged so far, one mapping a log, each with its "step".
        learned: which tokens the loss is of, where it is not of sampled completions.
    """
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    name = (config["training"].get("hub_model_id") or run_dir.resolve().name).rpartition("/")[2]
    facts = run_facts(config, read_json(run_dir / "environment.json"), history)
    facts["learned"] = learned
    facts["applied"] = read_json(run_dir / APPLIED) if (run_dir / APPLIED).is_file() else None
    new_card(folder, name, facts).save(folder / CARD)


def run_facts(
    config: Mapping[str, Any], environment: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What the template says of a training, from config.yaml, environment.json and the trainer's logs. `first` and
    `last` are means of the first and last tenth of the logged steps (of one at least): of the reward, or of the loss
    where there is none."""
    algorithm = algorithm_of(config)
    measured = "loss" if algorithm == "sft" else "reward"
    logs = [row for row in history if measured in row]
    values = [row[measured] for row in logs]
    tenth = max(1, len(values) // 10)
    columns = [name for name in CURVE if any(name in row for row in logs) and (name != "loss" or measured == "loss")]
    shown = sorted({round(place * (len(logs) - 1) / (CURVE_ROWS - 1)) for place in range(CURVE_ROWS)}) if logs else []
    return {
        "config": config,
        "environment": environment,
        "algorithm": algorithm,
        "linked_algorithm": linked_algorithm(algorithm),
        "steps": max((row["step"] for row in history), default=0),
        "dataset": ", ".join(
            _linked(name, "datasets/") for name in data_sets(config["dataset"]["dataset_name_or_path"])
        ),
        "first": f"{statistics.fmean(values[:tenth]):.3f}" if values else "–",
        "last": f"{statistics.fmean(values[-tenth:]):.3f}" if values else "–",
        "curve_columns": ["step", *columns],
        "curve": [
            [str(row["step"]), *(format(row[name], CURVE[name]) if name in row else "–" for name in columns)]
            for row in (logs[place] for place in shown)
        ],
        "adapter_fields": [name for name in reads_of(config["peft"]["type"]) if not name.endswith("_modules")],
    }


def linked_algorithm(name: str) -> str:
    """Its title with a link to its paper."""
    if name == "sft":
        return "supervised fine-tuning"
    return f"[{title_of(name)}](https://arxiv.org/abs/{ALGORITHMS[name].paper.removeprefix('arXiv ')})"


def add_results(adapter: Path, result_dirs: Iterable[Path]) -> list[EvalResult]:
    """Write the scores of `adapter` in `result_dirs` into its card, in the place of those that stand there. A whole
    model is taken too.

    A card of someone else's keeps its text and its metadata: the results are added at its end.

    Raises:
        UserError: no adapter, a card whose fields can't be read, or a folder without results of it.
    """
    if not is_whole(adapter):
        require_adapter(adapter, "ADAPTER")
    own_hash = content_hash(adapter)
    summaries = [summary for folder in result_dirs for summary in read_summaries(folder, own_hash, adapter)]
    file, name = adapter / CARD, card_name(adapter)
    try:
        card = ModelCard.load(file, ignore_metadata_errors=True) if file.is_file() else new_card(adapter, name)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"ADAPTER {file}: its fields are not YAML ({error}); correct or remove them") from error
    data: Any = card.data
    for field, value in metadata(adapter).to_dict().items():
        if data.get(field) is None:
            data[field] = value
    title = re.search(r"^# (.+)$", card.text, re.MULTILINE)
    data.model_name = title[1].strip() if title else name
    data.eval_results = [r for summary in summaries if scored_hash(summary) == own_hash for r in eval_results(summary)]
    card.text = with_results(card.text, results_text(summaries, own_hash))
    card.save(file)
    return data.eval_results


def is_whole(folder: Path) -> bool:
    """Whether a whole model lies there, and no adapter."""
    return (folder / "config.json").is_file() and not (folder / ADAPTER_CONFIG).is_file()


def scored_hash(summary: Mapping[str, Any]) -> str:
    """The adapter's, or that of the model alone."""
    return summary["adapter_hash"] or summary["base_hash"]


def hash_of_base(model: Path) -> str | None:
    """content_hash of the model that a run in the folder around `model` has trained, where both lie on this machine."""
    try:
        config = yaml.safe_load((model.resolve().parent / "config.yaml").read_text(encoding="utf-8"))
        base = Path(config["model"]["model_name_or_path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    return content_hash(base) if base.is_dir() else None


def read_summaries(folder: Path, own_hash: str, adapter: Path) -> list[Summary]:
    """Each summary.json below `folder` that is of this adapter or whole model, after those of its base alone."""
    if not folder.is_dir():
        raise UserError(f"--results {folder}: no such folder; write what --result_dir of perl/eval.py was")
    files = [file.with_name("summary.json") for file in sorted(folder.glob("**/run.json"))]
    for file in [file for file in files if not file.is_file()]:
        log.warning("%s is left out: its evaluation has not ended", file.parent)
    summaries = [read_json(file, hint=AGAIN, kind=Summary) for file in files if file.is_file()]
    for file, summary in zip(filter(Path.is_file, files), summaries, strict=True):
        if not (summary["dataset"] in TASKS or hub_dataset(summary["dataset"])):
            summary["dataset"] = file.parent.name  # of two files of one name the evaluator's folders have two
    of_adapter = [summary for summary in summaries if scored_hash(summary) == own_hash]
    bases = {hash_of_base(adapter)} if is_whole(adapter) else {summary["base_hash"] for summary in of_adapter}
    of_base = [s for s in summaries if s["adapter_hash"] is None and s["base_hash"] in bases]
    if not of_adapter and not of_base:
        flag = "--model" if is_whole(adapter) else "--adapter"
        raise UserError(
            f"--results {folder}: holds no results of {adapter}; score it with python perl/eval.py {flag} {adapter}"
            f" --result_dir {folder}"
        )
    return of_base + of_adapter


def eval_results(summary: Mapping[str, Any]) -> list[EvalResult]:
    """One entry of the model-index for each metric that says something of its own; values and intervals in percent."""
    dataset, telling = summary["dataset"], {"accuracy", *shown(summary["metrics"])}
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=hub_dataset(dataset) or _local_name(dataset),
            dataset_name=_local_name(dataset),
            metric_type=metric,
            metric_name=metric,
            metric_value=round(100 * e["value"], 2),
            # Not dataset_args: the index keeps one set of them for all results of a data set.
            metric_args={
                "interval_95": [round(100 * e["low"], 2), round(100 * e["high"], 2)],
                "problems": summary["problems"],
                "samples_per_problem": summary["n"],
                **({"quantization": quantization} if (quantization := summary.get("quantization")) else {}),
                **summary["sampling"],
            },
        )
        for metric, e in summary["metrics"].items()
        if metric in telling and not metric.startswith("avg@")
    ]


def results_text(summaries: Sequence[Mapping[str, Any]], own_hash: str) -> str:
    """A table of the scores, and below it how they were made."""
    lines = ["| dataset | model | metric | value, % | 95 % interval |", "|---|---|---|---:|---:|"]
    for summary in summaries:
        trained = "this adapter" if summary["adapter_hash"] else "this model"
        who = trained if scored_hash(summary) == own_hash else "the base"
        if quantization := summary.get("quantization"):
            who += f", in {quantization}"
        for result in eval_results(summary):
            low, high = (result.metric_args or {})["interval_95"]
            scores = f"{result.metric_value:.2f} | {low:.2f} – {high:.2f}"
            lines.append(f"| {result.dataset_name} | {who} | {result.metric_type} | {scores} |")
    lines += ["", "Intervals by bootstrap over problems.", ""]
    return "\n".join([*lines, *dict.fromkeys(_how_made(summary) for summary in summaries)])


def _how_made(summary: Mapping[str, Any]) -> str:
    sampling = ", ".join(f"{name} {value:g}" for name, value in summary["sampling"].items())
    versions = ", ".join(f"{name} {version}" for name, version in summary["provenance"]["versions"].items())
    weights = f", weights in {summary['quantization']}" if summary.get("quantization") else ""
    unextracted = "" if summary["unextracted"] is None else f", no answer found {summary['unextracted']:.1%}"
    return (
        f"- {_local_name(summary['dataset'])}: {summary['problems']} problems, {summary['n']} samples of each;"
        f" {sampling}; engine {', '.join(summary['engines'])}, dtype {summary['dtype']}{weights}; truncated"
        f" {summary['truncated']:.1%}{unextracted}. {versions}; commit of perl"
        f" {summary['provenance']['git_commit'] or 'unknown'}"
    )


def with_results(text: str, results: str) -> str:
    """The card's text with `results` between the marks; without marks, in a section of its own at the end."""
    section = f"{BEGIN}\n{results}\n{END}"
    if BEGIN in text and END in text:
        return re.sub(f"{BEGIN}.*{END}", lambda _: section, text, count=1, flags=re.DOTALL)
    return f"{text.rstrip()}\n\n## Results\n\n{section}\n"


def new_card(folder: Path, name: str, run: Mapping[str, Any] | None = None) -> ModelCard:
    """A card without results for the adapter or the whole model in `folder`; `run` (run_facts) where perl has trained
    it."""
    config, base = _adapter_and_base(folder, run and run["config"])
    named = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else config.get("peft_type", "")
    return ModelCard.from_template(
        metadata(folder, run and run["config"]),
        template_path=str(TEMPLATE),
        name=name,
        method=named and with_article(adapter_title(named)),
        base=_linked(base, ""),
        base_name=base if _is_hub_name(base) else f"path/to/{_local_name(base)}",
        version=__version__,
        results=NOT_EVALUATED,
        run=run,
    )


def metadata(folder: Path, run_config: Mapping[str, Any] | None = None) -> ModelCardData:
    """The hub's metadata as far as it is known: names of local folders and files are none of it.

    Args:
        folder: the adapter's, or the whole model's.
        run_config: config.yaml of the run that trained it, where perl did.
    """
    config, base = _adapter_and_base(folder, run_config)
    tags = ["transformers", *([config["peft_type"].lower()] if config else [])]
    if _is_hub_name(base):
        tags.append(f"base_model:{'adapter' if config else 'finetune'}:{base}")
    if run_config:
        tags += [algorithm_of(run_config), "trl", "perl"]
    trained_on = data_sets(run_config["dataset"]["dataset_name_or_path"]) if run_config else []
    return ModelCardData(
        base_model=base if _is_hub_name(base) else None,
        datasets=[name for spec in trained_on if (name := hub_dataset(spec))] or None,
        library_name="peft" if config else "transformers",
        license=license_of(base),
        pipeline_tag="text-generation",
        tags=tags,
    )


def license_of(base: str) -> str | None:
    """The licence that the base's own card names, where that card lies on this machine; nothing is downloaded."""
    card = Path(base) / CARD if Path(base).is_dir() else _is_hub_name(base) and try_to_load_from_cache(base, CARD)
    try:
        data = metadata_load(card) if isinstance(card, str | Path) else None
    except (OSError, ValueError, yaml.YAMLError):
        return None  # there is none, or its block is no mapping or no YAML
    named = (data or {}).get("license")
    return named if isinstance(named, str) else None


def _adapter_and_base(folder: Path, run_config: Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """adapter_config.json, empty for a whole model, and the name of the base."""
    if is_whole(folder):
        return {}, run_config["model"]["model_name_or_path"] if run_config else UNKNOWN_BASE
    config = read_json(folder / ADAPTER_CONFIG, hint="copy it again")
    return config, config.get("base_model_name_or_path") or UNKNOWN_BASE


def card_name(folder: Path) -> str:
    """The run's name, and the checkpoint's where it is not the final adapter or model."""
    folder = folder.resolve()
    if folder.name in ("adapter", "model"):
        return folder.parent.name
    return f"{folder.parent.name}-{folder.name}" if folder.name.startswith("checkpoint-") else folder.name


def hub_dataset(spec: str) -> str | None:
    """The hub's name of a data set that the user named by a task or by its hub name; None for a file or folder."""
    if spec in TASKS:
        hub = TASKS[spec].hub
        return hub.repo if hub else None
    repo = spec.partition(":")[0]
    return repo if _is_hub_name(repo) and not repo.endswith(SUFFIXES) else None


def _is_hub_name(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def _linked(spec: str, kind: str) -> str:
    """A Markdown link to the hub; a local file or folder by its name alone."""
    name = hub_dataset(spec) if kind else spec if _is_hub_name(spec) else None
    return f"[{spec}](https://huggingface.co/{kind}{name})" if name else f"`{_local_name(spec)}` (local)"


def _local_name(spec: str) -> str:
    """The last part of a path: the rest tells of this machine alone."""
    return spec if spec in TASKS or hub_dataset(spec) else Path(spec.rstrip("/")).name
