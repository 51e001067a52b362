"""The model card of an adapter or a whole model: README.md with the hub's metadata, from what was measured.

    training     write_training_card    at each save: base, data, settings, the reward over the steps, versions
    evaluation   add_results            `python -m perl card`: scores with their intervals, in the model-index too

The training owns the folders that it writes, so its card replaces TRL's and PEFT's. In a folder of the user's, only
the part between the two marks of the results and the metadata change.
"""

from __future__ import annotations

import json
import logging
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load, try_to_load_from_cache

from perl import __version__
from perl.adapters.titles import TITLES, with_article
from perl.algorithms import ALGORITHMS
from perl.algorithms.titles import algorithm_of, title_of
from perl.base.errors import UserError
from perl.config.peft_fields import reads_of
from perl.config.schema import data_sets
from perl.models.folders import ADAPTER_CONFIG, content_hash, require_adapter
from perl.runs.rundir import APPLIED
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
CURVE: dict[str, tuple[str, Callable[[float], str]]] = {
    "reward": ("reward", "{:.3f}".format),
    "loss": ("loss", "{:.4f}".format),
    "mean_token_accuracy": ("likeliest token right", "{:.3f}".format),
    "reward_std": ("its standard deviation in a group", "{:.3f}".format),
    "completions/mean_length": ("tokens a completion", "{:.0f}".format),
    "entropy": ("entropy", "{:.3f}".format),
    "aqn/sigma": ("σ of the noise", "{:.3g}".format),
}
"""Metric -> (head, format) of its column; a metric that the run did not log has none."""


SHORT = {"lora_alpha": "alpha", "lora_dropout": "dropout", "lora_plus_lr_ratio": "learning rate of B over A's"}
"""Fields of the group `peft` as the card calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the card says of a training."""

    steps: int
    dataset: str
    algorithm: str
    """Key of ALGORITHMS, or sft."""
    noise: bool
    first: str
    """Mean of the first tenth of the logged steps (of one step at least), of the reward or, without one, the loss."""
    last: str
    """Mean of the last tenth."""
    curve_columns: list[str]
    curve: list[list[str]]
    settings: dict[str, str]
    versions: str


# Training


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
    environment = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    name = (config["training"].get("hub_model_id") or run_dir.resolve().name).rpartition("/")[2]
    dataset = config["dataset"]["dataset_name_or_path"]
    facts = run_facts(config, environment, history)
    if learned is not None:
        facts.settings["loss"] += f", of {learned}"
    if (run_dir / APPLIED).is_file() and config["peft"]["type"] != "none":
        facts.settings["adapter"] += f"; {trained(_read_json(run_dir / APPLIED))}"
    new_card(folder, name, dataset, facts, config["model"]["model_name_or_path"]).save(folder / CARD)


def run_facts(
    config: Mapping[str, Any], environment: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> RunFacts:
    """From config.yaml, environment.json and the trainer's logs."""
    algorithm = algorithm_of(config)
    told, left_out = ("loss", set()) if algorithm == "sft" else ("reward", {"loss"})
    logs = [row for row in history if told in row]
    values = [row[told] for row in logs]
    ends = max(1, len(values) // 10)
    columns = [name for name in CURVE if name not in left_out and any(name in row for row in logs)]
    shown = sorted({round(place * (len(logs) - 1) / (CURVE_ROWS - 1)) for place in range(CURVE_ROWS)}) if logs else []
    return RunFacts(
        steps=max((row["step"] for row in history), default=0),
        dataset=", ".join(_linked(spec, "datasets/") for spec in data_sets(config["dataset"]["dataset_name_or_path"])),
        algorithm=algorithm,
        noise=algorithm != "sft" and config["noise_injection"]["enabled"],
        first=f"{statistics.fmean(values[:ends]):.3f}" if values else "–",
        last=f"{statistics.fmean(values[-ends:]):.3f}" if values else "–",
        curve_columns=["step", *(CURVE[name][0] for name in columns)],
        curve=[
            [str(logs[i]["step"]), *(CURVE[name][1](logs[i][name]) if name in logs[i] else "–" for name in columns)]
            for i in shown
        ],
        settings=_settings(config, environment),
        versions=", ".join(f"{name} {version}" for name, version in environment["packages"].items()),
    )


def linked_algorithm(name: str) -> str:
    """Its title with a link to its paper."""
    if name == "sft":
        return "supervised fine-tuning"
    paper = ALGORITHMS[name].paper.removeprefix("arXiv ")
    return f"[{title_of(name)}](https://arxiv.org/abs/{paper})"


def _settings(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    training, processes = config["training"], environment["num_processes"]
    batch = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * processes
    own = _settings_of_sft(config, batch) if algorithm_of(config) == "sft" else _settings_of_rewarded(config, batch)
    return {
        **own,
        "adapter": _adapter(config["peft"]),
        "learning rate": f"{training['learning_rate']}, {training['lr_scheduler_type']}",
        "seed": str(config["common"]["seed"]),
        "devices": f"{processes} × {environment['device']}",
        "commit of perl": environment["git_commit"] or "unknown",
    }


def trained(applied: Mapping[str, Any]) -> str:
    """How much of the model a run has trained, from its peft.json."""
    share = applied["trained"] / max(applied["parameters"], 1)
    return f"{applied['trained']:,} of {applied['parameters']:,} parameters trained ({share:.3%})"


def _adapter(peft: Mapping[str, Any]) -> str:
    if peft["type"] == "none":
        start = "" if peft.get("adapter") is None else ", on the base merged with an earlier adapter"
        return f"none: all weights are trained{start}"
    reads = reads_of(peft["type"])
    settings = {SHORT.get(name, name): peft.get(name) for name in reads if not name.endswith("_modules")}
    made = ", ".join([peft["type"], *(f"{name} {value}" for name, value in settings.items() if value is not None)])
    if peft.get("adapter") is None:
        return made
    how = "continues" if peft["adapter_mode"] == "continue" else "on the base merged with"
    return f"{made}; {how} an earlier adapter"


def _settings_of_sft(config: Mapping[str, Any], batch: int) -> dict[str, str]:
    training = config["training"]
    return {
        "loss": training["loss_type"],
        "rows a step": f"{batch}, packed" if training["packing"] else str(batch),
        "longest row": f"{training['max_length']} tokens",
    }


def _settings_of_rewarded(config: Mapping[str, Any], completions: int) -> dict[str, str]:
    training, noise = config["training"], config["noise_injection"]
    rewards = [Path(name).name for name in config["reward"]["functions"]]  # no path of this machine
    return {
        "rewards": ", ".join(rewards),
        "loss": f"{training['loss_type']}, beta {training['beta']}",
        **_settings_of_algorithm(config),
        "completions a step": f"{completions}, {training['num_generations']} of each prompt",
        "longest completion": f"{training['max_completion_length']} tokens",
        "sampling": f"temperature {training['temperature']}, top_p {training['top_p']}",
        "noise (AQN)": _noise(noise) if noise["enabled"] else "none",
    }


def _settings_of_algorithm(config: Mapping[str, Any]) -> dict[str, str]:
    """What is not GRPO's: dynamic sampling, KL in the reward, the critic."""
    said, critic = config.get("algorithm", {}), config.get("critic", {})
    found = {}
    if said.get("dynamic_sampling"):
        found["dynamic sampling"] = f"at most {said['max_resample_factor']:g} times the groups of a batch"
    if said.get("kl_in_reward"):
        found["KL in the reward"] = f"{said['kl_in_reward']}, {said['kl_in_reward_estimator']}"
    if ALGORITHMS[algorithm_of(config)].critic:
        found["critic"] = f"learning rate {critic['lr']}, LoRA r {critic['r']}, warmup {critic['warmup_steps']} steps"
        found["gamma, lambda"] = f"{said['gamma']}, {said['lam']}"
    return found


def _noise(noise: Mapping[str, Any]) -> str:
    """The noise in a few words."""
    of = " of each layer's RMS" if noise.get("relative") else ""  # of a run that was begun before the field existed
    if noise["schedule"] == "target_kl":
        target = f"for a KL divergence from {noise['target_kl_start']} to {noise['target_kl_end']} nats a token"
        return f"σ from {noise['sigma_start']}{of}, set {target}, {noise['num_stages']} stages"
    ends = f"σ from {noise['sigma_start']} to {noise['sigma_end']}{of}"
    return f"{ends}, {noise['schedule']}, {noise['num_stages']} stages"


# Results


def add_results(adapter: Path, result_dirs: Iterable[Path]) -> list[EvalResult]:
    """Write the scores of `adapter` in `result_dirs` into its card, in the place of those that stand there. A whole
    model is taken too.

    A card of someone else's keeps its text and its metadata: the results are added at its end.

    Raises:
        UserError: no adapter, or a folder without results of it.
    """
    if not is_whole(adapter):
        require_adapter(adapter, "ADAPTER")
    own_hash = content_hash(adapter)
    base_hash = hash_of_base(adapter) if is_whole(adapter) else None
    summaries = [s for folder in result_dirs for s in read_summaries(folder, own_hash, adapter, base_hash)]
    file = adapter / CARD
    theirs = ModelCard.load(file, ignore_metadata_errors=True) if file.is_file() else None
    card = theirs or new_card(adapter, card_name(adapter))
    data: Any = card.data
    own = [summary for summary in summaries if scored_hash(summary) == own_hash]
    results = [result for summary in own for result in eval_results(summary)]
    for field, value in metadata(adapter).to_dict().items():
        if data.get(field) is None:
            data[field] = value
    title = re.search(r"^# (.+)$", card.text, re.MULTILINE)
    data.model_name, data.eval_results = title[1].strip() if title else card_name(adapter), results
    card.text = with_results(card.text, results_text(summaries, own_hash))
    card.save(file)
    return results


def is_whole(folder: Path) -> bool:
    """Whether a whole model lies there, and no adapter."""
    return (folder / "config.json").is_file() and not (folder / ADAPTER_CONFIG).is_file()


def scored_hash(summary: Mapping[str, Any]) -> str:
    """Of what was scored: the adapter, or the model alone."""
    return summary["adapter_hash"] or summary["base_hash"]


def hash_of_base(model: Path) -> str | None:
    """content_hash of the model that a run in the folder around `model` has trained, where both lie on this machine."""
    try:
        config = yaml.safe_load((model.resolve().parent / "config.yaml").read_text(encoding="utf-8"))
        base = Path(config["model"]["model_name_or_path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    return content_hash(base) if base.is_dir() else None


def read_summaries(folder: Path, own_hash: str, adapter: Path, base_hash: str | None = None) -> list[dict[str, Any]]:
    """Each summary.json below `folder` that is of this adapter or whole model, and of its base alone.

    Args:
        base_hash: of the base of a whole model, where it is known.
    """
    if not folder.is_dir():
        raise UserError(f"--results {folder}: no such folder; write what --result_dir of perl/eval.py was")
    files = [file.with_name("summary.json") for file in sorted(folder.glob("**/run.json"))]
    for file in [file for file in files if not file.is_file()]:
        log.warning("%s is left out: its evaluation has not ended", file.parent)
    found = [_read_json(file) for file in files if file.is_file()]
    own = [summary for summary in found if scored_hash(summary) == own_hash]
    bases = {base_hash} if is_whole(adapter) else {summary["base_hash"] for summary in own}
    of_base = [s for s in found if s["adapter_hash"] is None and s["base_hash"] in bases]
    if not own and not of_base:
        flag = "--model" if is_whole(adapter) else "--adapter"
        raise UserError(
            f"--results {folder}: holds no results of {adapter}; score it with python perl/eval.py {flag} {adapter}"
            f" --result_dir {folder}"
        )
    return of_base + own


def eval_results(summary: Mapping[str, Any]) -> list[EvalResult]:
    """One entry of the model-index for each metric that says something of its own; values and intervals in percent."""
    dataset = summary["dataset"]
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
                **summary["sampling"],
            },
        )
        for metric, e in shown_metrics(summary).items()
    ]


def shown_metrics(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Without those that say the same as another: avg@n is accuracy, as are pass@1, maj@1 and maj@2."""
    same = ("pass@1", "maj@1", "maj@2")
    return {k: e for k, e in summary["metrics"].items() if k not in same and not k.startswith("avg@")}


def results_text(summaries: Sequence[Mapping[str, Any]], own_hash: str) -> str:
    """A table of the scores, and below it how they were made."""
    lines = ["| dataset | model | metric | value, % | 95 % interval |", "|---|---|---|---:|---:|"]
    for summary in summaries:
        what = "this adapter" if summary["adapter_hash"] else "this model"
        who = what if scored_hash(summary) == own_hash else "the base"
        for metric, e in shown_metrics(summary).items():
            scores = f"{100 * e['value']:.2f} | {100 * e['low']:.2f} – {100 * e['high']:.2f}"
            lines.append(f"| {_local_name(summary['dataset'])} | {who} | {metric} | {scores} |")
    lines += ["", "Intervals by bootstrap over problems.", ""]
    made = dict.fromkeys(_how_made(summary) for summary in summaries)
    return "\n".join([*lines, *(f"- {line}" for line in made)])


def _how_made(summary: Mapping[str, Any]) -> str:
    sampling, provenance = summary["sampling"], summary["provenance"]
    parts = [f"temperature {sampling['temperature']:g}" if sampling["temperature"] else "greedy"]
    parts += [f"{name} {sampling[name]:g}" for name in ("top_p", "top_k") if sampling["temperature"]]
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    return (
        f"{_local_name(summary['dataset'])}: {_how_many(summary)}; {', '.join(parts)}, at most"
        f" {sampling['max_new_tokens']} tokens, seed {sampling['seed']}; engine {', '.join(summary['engines'])}, dtype"
        f" {summary['dtype']}; truncated {summary['truncated']:.1%}, no answer found {summary['unextracted']:.1%}."
        f" {versions}; commit of perl {provenance['git_commit'] or 'unknown'}"
    )


def _how_many(summary: Mapping[str, Any]) -> str:
    return f"{summary['problems']} problems, {summary['n']} samples of each"


def with_results(text: str, results: str) -> str:
    """The card's text with `results` between the marks; without marks, in a section of its own at the end."""
    section = f"{BEGIN}\n{results}\n{END}"
    if BEGIN in text and END in text:
        return re.sub(f"{BEGIN}.*{END}", lambda _: section, text, count=1, flags=re.DOTALL)
    return f"{text.rstrip()}\n\n## Results\n\n{section}\n"


# The card


def new_card(
    folder: Path,
    name: str,
    dataset: str | list[str] | None = None,
    run: RunFacts | None = None,
    trained: str | None = None,
) -> ModelCard:
    """A card without results for the adapter or the whole model in `folder`; `dataset` and `run` where perl has trained
    it, and `trained`, the model that it trained."""
    whole = is_whole(folder)
    base = (trained or UNKNOWN_BASE) if whole else base_of(_read_json(folder / ADAPTER_CONFIG))
    return ModelCard.from_template(
        metadata(folder, dataset, run.algorithm if run else "grpo", base),
        template_path=str(TEMPLATE),
        name=name,
        method="" if whole else with_article(method(_read_json(folder / ADAPTER_CONFIG))),
        base=_linked(base, ""),
        base_name=base if _is_hub_name(base) else f"path/to/{_local_name(base)}",
        version=__version__,
        results=NOT_EVALUATED,
        run=run,
        algorithm=linked_algorithm(run.algorithm) if run else "",
    )


def metadata(
    folder: Path, dataset: str | list[str] | None = None, algorithm: str = "grpo", base: str | None = None
) -> ModelCardData:
    """The hub's metadata as far as it is known: names of local folders and files are none of it.

    Args:
        folder: the adapter's, or the whole model's.
        dataset: what perl trained it on, as the user wrote it; None where another program trained it.
        algorithm: key of ALGORITHMS or sft, where perl trained it.
        base: of a whole model, the model that was trained, where it is known.
    """
    whole = is_whole(folder)
    adapter_config = {} if whole else _read_json(folder / ADAPTER_CONFIG)
    base = (base or UNKNOWN_BASE) if whole else base_of(adapter_config)
    tags = ["transformers"] if whole else ["transformers", str(adapter_config["peft_type"]).lower()]
    if _is_hub_name(base):
        tags.append(f"base_model:{'finetune' if whole else 'adapter'}:{base}")
    if dataset is not None:
        tags += [algorithm, "trl", "perl"]
    trained_on = [name for spec in data_sets(dataset or []) if (name := hub_dataset(spec))]
    return ModelCardData(
        base_model=base if _is_hub_name(base) else None,
        datasets=trained_on or None,
        library_name="transformers" if whole else "peft",
        license=license_of(base),
        pipeline_tag="text-generation",
        tags=tags,
    )


def license_of(base: str) -> str | None:
    """The licence that the base's own card names, where that card lies on this machine; nothing is downloaded."""
    card = Path(base) / CARD if Path(base).is_dir() else None
    if card is None and _is_hub_name(base) and isinstance(cached := try_to_load_from_cache(base, CARD), str):
        card = Path(cached)
    if card is None or not card.is_file():
        return None
    try:
        data = metadata_load(card)
    except (ValueError, yaml.YAMLError):
        return None  # somebody else's card, whose block is no mapping or no YAML
    license = (data or {}).get("license")
    return license if isinstance(license, str) else None


def method(adapter_config: Mapping[str, Any]) -> str:
    """LoRA, rsLoRA, DoRA, AdaLoRA, …, or PEFT's own name."""
    if adapter_config.get("use_dora"):
        return "DoRA"
    if adapter_config.get("use_rslora"):
        return "rsLoRA"
    own = str(adapter_config["peft_type"])
    return TITLES.get(own.lower(), own)


def base_of(adapter_config: Mapping[str, Any]) -> str:
    return adapter_config.get("base_model_name_or_path") or UNKNOWN_BASE


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
    """Of a path its last part: the rest tells of this machine alone."""
    return spec if spec in TASKS or hub_dataset(spec) else Path(spec.rstrip("/")).name


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not readable ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: holds {found!r:.40}, and no fields; copy it again")
    return found
