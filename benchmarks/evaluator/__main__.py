"""The evaluator side by side with raw vLLM, lm-evaluation-harness and math-verify.

    python -m benchmarks.evaluator [--only raw|dp2|lm_eval|grading] [--rows N] [--pairs 3] [--few_shot N] [--cores N]

raw: tokens/s after start-up of perl/eval.py --use_vllm over those of `LLM.generate` with the same prompts and
SamplingParams, each row's seed included. dp2: the same of --dp_size 2 over two raw engines, each pinned to one core.
lm_eval: wall time of lm-evaluation-harness with its vLLM backend over ours, both from the command to its end, on the
same problems and model, with --few_shot after worked examples; completions and verdicts compared; each side on one
core, or on --cores: ours by --dp_size, lm-eval by the threads of its engine. grading: completions a second on one core.

The last line is JSON: every ratio is the other's cost over ours, or our rate over the other's, by median over pairs.
GSM8K and MATH-500 are read from --data (gsm8k/test.jsonl, bench/math500.jsonl); what is not there is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.evaluator import generation, grading, lm_eval
from benchmarks.evaluator.ours import ROOT
from perl.base.files import write_json
from perl.base.provenance import versions

PARTS = ("raw", "dp2", "lm_eval", "grading")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--rows", type=int, help="only the first so many problems of each set")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--n", type=int, default=2, help="completions of each problem in raw and dp2")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "quickstart-base", help="of raw and dp2")
    parser.add_argument("--trained", type=Path, help="of lm_eval; default: --model, trained as in make quickstart")
    parser.add_argument(
        "--few_shot", type=int, default=0, help="of lm_eval: the first so many rows of gsm8k/train.jsonl"
    )
    parser.add_argument("--cores", type=int, default=1, help="of lm_eval, for each side")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--output", type=Path, help="file for the JSON of the last line, as those in docs/results")
    return parser


def generation_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Flags of perl/eval.py for raw and dp2: drawn at temperature 1, so that every row needs its seed."""
    gsm8k = options.data / "gsm8k" / "test.jsonl"
    if not gsm8k.is_file():
        print(f"{gsm8k} is not there; the quickstart's training problems are used in its place", flush=True)
        gsm8k = ROOT / "assets" / "quickstart-data" / "train.jsonl"
    flags = {"model": options.model, "dataset": gsm8k, "task": "gsm8k", "max_new_tokens": options.max_new_tokens}
    flags |= {"temperature": 1.0, "n": options.n}
    return flags | ({"max_samples": options.rows} if options.rows else {})


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    parts = [options.only] if options.only else PARTS
    if parts != ["grading"] and importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed here; `make .venv/.installed-full` installs it, --only grading needs none")
    examples = options.data / "gsm8k" / "train.jsonl"
    if options.few_shot and "lm_eval" in parts and not examples.is_file():
        parser.error(f"--few_shot {options.few_shot}: {examples} is not there; name the folder with --data")
    result: dict[str, Any] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "raw" in parts:
            result |= generation.measure_one(generation_flags(options), folder, options.pairs)
        if "dp2" in parts:
            result |= generation.measure_two(generation_flags(options), folder, options.pairs)
        if "lm_eval" in parts:
            result |= lm_eval.measure(options, folder)
        if "grading" in parts:
            result |= grading.measure(options.data, options.rows, options.pairs)
    given = {name: value for name, value in vars(options).items() if name not in ("data", "output")}
    arguments = {
        name: os.path.relpath(value, ROOT) if isinstance(value, Path) else value for name, value in given.items()
    }
    seconds = round(time.monotonic() - began)
    made = versions() | {"lm-eval": lm_eval.VERSION}
    line = {"benchmark": "evaluator", **arguments, "benchmark_s": seconds, **result, "versions": made}
    if options.output:
        write_json(options.output, line)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
