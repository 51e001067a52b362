"""A raw vLLM engine: `LLM.generate`, with nothing around it, on the rows that the evaluator completes.

    python -m benchmarks.evaluator.raw WORK.json

It prints a JSON line when the engine is up, and one with its seconds and tokens for each line that it reads. Between
two turns it holds its model and uses no processor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.evaluator.ours import environment
from perl.records import Sample

MAX_SEQUENCES = 256


@dataclass(frozen=True)
class Work:
    """What one raw engine is started with."""

    model: str
    eos_token_ids: list[int]
    context: int
    """Tokens of the longest prompt and completion together."""
    prompts: list[list[int]]
    seeds: list[int]
    sampling: dict[str, Any]
    """SamplingParams of every row, but for the seed."""
    core: int | None
    """The one core that the process keeps to; None: all of them."""


@dataclass(frozen=True)
class Turn:
    """One call of `LLM.generate`."""

    wall_s: float
    tokens: int
    """Without the end-of-sequence token, as perl counts them."""
    texts: list[str]


class RawEngine:
    """The parent's side of the process."""

    def __init__(self, work: Work, folder: Path, name: str):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(asdict(work)), encoding="utf-8")
        self._log = (folder / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.evaluator.raw", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(),
            text=True,
        )

    def __enter__(self) -> RawEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("end\n")

    def read(self) -> dict[str, Any]:
        """The next line that the process writes."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the raw engine ended; its messages are in {self._log.name}")

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def turn(self) -> Turn:
        self.begin()
        return Turn(**self.read())


def work_of(model: Path, rows: Sequence[Sample], core: int | None) -> Work:
    """The evaluator's rows, all of one sampling, as SamplingParams of vLLM's."""
    from transformers import AutoConfig, AutoTokenizer

    from perl.models.folders import eos_token_ids

    ends = eos_token_ids(str(model), AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model))
    sampling = rows[0].sampling
    return Work(
        model=str(model),
        eos_token_ids=sorted(ends),
        context=max(len(row.token_ids) for row in rows) + sampling.max_new_tokens,
        prompts=[list(row.token_ids) for row in rows],
        seeds=[row.seed for row in rows],
        sampling={
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_new_tokens,
        },
        core=core,
    )


def serve(work: Work) -> None:
    if work.core is not None:
        os.sched_setaffinity(0, [work.core])
    started = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=work.model,
        dtype="float32",
        max_model_len=work.context,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=max(work.context, 8192),
        enable_chunked_prefill=False,  # a seeded request dies on a prefill in several parts on a CPU
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    print(json.dumps({"start_s": time.perf_counter() - started}), flush=True)
    for line in sys.stdin:
        if line.strip() != "go":
            break
        llm.reset_prefix_cache()
        began = time.perf_counter()
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        parameters = [
            SamplingParams(**work.sampling, seed=seed, stop_token_ids=work.eos_token_ids) for seed in work.seeds
        ]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        wall = time.perf_counter() - began
        rows = [output.outputs[0] for output in outputs]
        tokens = sum(len(row.token_ids) - (row.finish_reason == "stop") for row in rows)
        print(json.dumps({"wall_s": wall, "tokens": tokens, "texts": [row.text for row in rows]}), flush=True)


if __name__ == "__main__":
    serve(Work(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
