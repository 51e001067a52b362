"""One trained adapter, scored in every way that the evaluator has: do they agree, what does rounding cost, how fast?

    python -m benchmarks.adapter_paths --model BASE --adapter ADAPTER --dataset FILE [--output FILE] [--ways "..."]
    python -m benchmarks.adapter_paths --real outputs/real_1
    python -m benchmarks.adapter_paths --draw

Each way is a command of perl/eval.py, greedy, one after the other: transformers and vLLM with the adapter merged in
float32 and in bfloat16, and vLLM in bfloat16 with the adapter unmerged. Of each way the table and the last line, JSON,
have accuracy, the shares of rows whose completion and whose verdict equal those of the first way, tokens per second
without the start, and of the merge the share of the update that rounding loses; or the line with which the evaluator
refuses it, as it does where rounding leaves little of the adapter's effect. --real takes model, adapter and the
held-out problems of a folder of `python -m perl real`. `--draw` writes the table of --output into docs/real.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import perl
from benchmarks._learning import markdown, write_between
from perl.base.errors import report_errors
from perl.base.files import write_json
from perl.scoring.results import SUMMARY, read_samples
from perl.tools import course, real
from perl.tools.stages import ROOT

USERS_MISTAKE, REFUSED = 2, " differs from PEFT's"
"""How the evaluator ends where the merged model computes something else, and its words."""
RESULTS = ROOT / "docs" / "results" / "adapter_paths.json"
WAYS: dict[str, tuple[str, ...]] = {
    "transformers, float32": ("--dtype", "float32"),
    "vLLM, float32": ("--use_vllm", "--dtype", "float32"),
    "transformers, bfloat16": ("--dtype", "bfloat16"),
    "vLLM, bfloat16": ("--use_vllm", "--dtype", "bfloat16"),
    "vLLM, bfloat16, unmerged": ("--use_vllm", "--dtype", "bfloat16", "--adapter_mode", "lora"),
}
"""Name -> flags of perl/eval.py."""
HEADS = ("way", "accuracy, %", "equal completions, %", "equal verdicts, %", "tokens/s", "start, s",
         "of the update lost, %")  # fmt: skip


def score(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One way's summary, and its rows by problem and sample; or why it is refused."""
    result = folder / name.replace(", ", "_")
    words = [str(ROOT / "perl" / "eval.py"), "--model", str(options.model), "--adapter", str(options.adapter)]
    words += [*WAYS[name], "--n", "1", "--temperature", "0", "--max_new_tokens", str(options.max_new_tokens)]
    words += ["--dataset", str(options.dataset), "--result_dir", str(result)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == USERS_MISTAKE and REFUSED in done.stderr:
        return {"refused": done.stderr.strip().splitlines()[-1].removeprefix("error: ")}
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    found = result / options.dataset.stem
    summary = json.loads((found / SUMMARY).read_text(encoding="utf-8"))
    return {"summary": summary, "rows": read_samples(found / "samples.jsonl")}


def agreement(one: Mapping[Any, Mapping[str, Any]], other: Mapping[Any, Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the rows of `one` whose completion, and whose score, `other` has too."""
    if one.keys() != other.keys():
        raise ValueError(f"{len(one.keys() ^ other.keys())} rows are not in both")
    pairs = [(row, other[place]) for place, row in one.items()]
    return {
        "equal_completions": sum(a["completion"] == b["completion"] for a, b in pairs) / len(pairs),
        "equal_verdicts": sum(a["score"] == b["score"] for a, b in pairs) / len(pairs),
    }


def row_of(way: Mapping[str, Any], first: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the table says of a way, next to the first one that was not refused."""
    if first is None or "refused" in way:
        return dict(way)
    summary = way["summary"]
    merge = summary["merge"] or {}
    return {
        "accuracy": round(summary["metrics"]["accuracy"]["value"], 4),
        **{name: round(share, 4) for name, share in agreement(first["rows"], way["rows"]).items()},
        "tokens_per_s": summary["generation"]["tokens_per_s"],
        "start_s": summary["generation"]["start_s"],
        "update_lost": merge.get("rounding_error"),
    }


def table(ways: Mapping[str, Mapping[str, Any]], heads: Sequence[str]) -> str:
    """Markdown: a row for each way; one that is refused has no numbers."""

    def percent(share: float | None) -> str:
        return "" if share is None else f"{100 * share:.1f}"

    lines = []
    for name, way in ways.items():
        shares = [percent(way.get(key)) for key in ("accuracy", "equal_completions", "equal_verdicts")]
        speed = [f"{way[key]:.0f}" if key in way else "" for key in ("tokens_per_s", "start_s")]
        lines.append([name, *shares, *speed, percent(way.get("update_lost"))])
    return markdown(heads, lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="a folder of `python -m perl real` that has finished")
    for name in ("model", "adapter", "dataset"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--ways", default=";".join(WAYS), help="names, separated by semicolons")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="only write the table")
    return parser


@report_errors()
def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.draw:
        if not options.output.is_file():
            parser.error(f"--output {options.output}: not there; --draw needs the JSON of a run")
        ways = json.loads(options.output.read_text(encoding="utf-8"))["ways"]
        write_between(ROOT / "docs" / "real.md", "adapter-paths", table(ways, HEADS))
        return
    if options.real is not None:
        settings = real.read_run(options.real, "grpo", "--real")
        options.model = course.model_folder(settings, options.real)
        options.adapter = options.real / "grpo" / "adapter"
        options.dataset = options.real / "data" / "test.jsonl"
    for name in ("model", "adapter", "dataset"):
        path = getattr(options, name)
        if path is None or not path.exists():
            parser.error(f"--{name} {path}: not there" if path else f"--{name}: name it, or --real")
        setattr(options, name, path.absolute())
    names = options.ways.split(";")
    if unknown := [name for name in names if name not in WAYS]:
        parser.error(f"--ways: unknown: {'; '.join(unknown)}; known: {'; '.join(WAYS)}")
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = None
        for name in names:
            found = score(name, options, Path(folder))
            first = first or (None if "refused" in found else found)
            rows[name] = row_of(found, first)
            print(f"{name}: {rows[name]}", flush=True)
    print(table(rows, HEADS))
    versions = {"perl": perl.__version__} | {name: version(name) for name in ("torch", "transformers")}
    result = {"benchmark": "adapter_paths", "problems": len(first["rows"]) if first else 0, "ways": rows}
    result |= {"versions": versions, "max_new_tokens": options.max_new_tokens, "seed": "greedy"}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.output, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
