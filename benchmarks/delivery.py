"""Thirteen faults by which a policy does not reach the worker that draws: does the run stop, and what does it say?

    python -m benchmarks.delivery [--engine fast|vllm] [--only "half of it" ...] [--clean 1000] [--bf16]

A training of a random model of two layers, drawn by one worker process: by `fast`, or by vLLM, where two of the faults
cannot be (NOT_OF_VLLM). Without a fault until step FAULTY; from there on the worker draws with another policy than the
trainer has sent. Each fault is injected twice: as the run is, and with the proof of what an engine holds switched off
(perl.training.pool.require_sent), which leaves the comparison of log-probabilities, and says how far the fault moves
the policy. Then `--clean` steps without a fault, where any stop is a false alarm. "TRL 1.16, by reading" is what its
AsyncGRPOTrainer would do (trl/experimental/async_grpo): it checks that the server takes the adapter's files, and
nothing of what draws: ratio and KL are logged, and stop nothing. Ends in a Markdown table and a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen2Config

import perl
from benchmarks._learning import markdown
from benchmarks._workload import EOS, PAD, VOCABULARY, make_tokenizer
from perl.adapters.delivery import delivered, from_bytes, to_bytes
from perl.base.errors import RankError, UserError
from perl.config.load import Config
from perl.config.schema import NoiseConfig, PeftConfig, RolloutConfig
from perl.config.training import TrainingConfig
from perl.engines.cache import Prefix
from perl.engines.runner import Runner
from perl.engines.torch_copy import TorchCopy
from perl.models.folders import load_model
from perl.records import Weights
from perl.training import pool as training_pool
from perl.training.grpo import import_trainer
from perl.workers.pool import WorkerPool
from perl.workers.rollouts import Copy, RolloutJob, Version
from perl.workers.worker import Result, WorkerEvent

FAULTY = 2
"""Optimizer steps before the first faulty batch: the adapter has moved, and two versions are there to be mixed up."""
LEAST = 0.01
"""Nats a token by which a fault has to move the policy."""
PROMPTS, GROUP, LENGTH = 2, 4, 12

FAULTS = {
    "not sent": "an adapter that was not loaded has no name at the server; merged weights: no",
    "not named": "no",
    "another version": "no",
    "half of it": "no",
    "a used name": "a name in use is refused by the server; its names count on over a resume",
    "stale prefix cache": "no, but each version has a name and so a cache of its own",
    "loaded twice": "no",
    "merged twice": "no",
    "wrong scaling": "no",
    "noise withheld": "has no noise",
    "another base": "no: the name alone is compared",
    "workers of a killed run": "no: its server outlives it and serves on",
    "truncated": "yes, by the server that reads the file",
}
"""Fault -> whether TRL's AsyncGRPOTrainer stops it. "loaded twice" has two forms."""


NOT_OF_VLLM = ("stale prefix cache", "merged twice")
"""It keeps no prefixes and merges nothing here."""


class FaultyInbox:
    """The worker's inbox, with what becomes of a payload on the way."""

    def __init__(self, inbox: Any, fault: str, start: dict[str, torch.Tensor]):
        self._inbox, self.fault = inbox, fault
        self._start = start
        """What an engine holds to which nothing was sent."""
        self._seen: dict[int, Any] = {}
        """Payload of each version."""
        self.version = 0

    def next_weights(self, *, wait: bool) -> Any:
        weights = self._inbox.next_weights(wait=wait)
        if weights is not None:
            self.version = weights.weights.version
            self._seen.setdefault(self.version, self._inbox.payload)
        return weights

    def take(self) -> Any:
        return self._inbox.take()

    def working(self) -> None:
        self._inbox.working()

    @property
    def payload(self) -> Any:
        sent, rms = self._seen[self.version]
        if self.version < FAULTY:
            return sent, rms
        start = self._start or from_bytes(self._seen[0][0])  # vLLM loads no adapter before it is sent one
        if self.fault == "not sent":
            sent = to_bytes(start)
        if self.fault in ("another version", "workers of a killed run"):
            sent, _ = self._seen[self.version - 1]
        if self.fault == "a used name":  # "adapter-0" is there since version 0, and is kept
            sent, _ = self._seen[self.version % 2]
        if self.fault == "half of it":
            tensors = from_bytes(sent)
            sent = to_bytes({name: tensors[name] if i % 4 < 2 else start[name] for i, name in enumerate(tensors)})
        if self.fault == "loaded twice":
            sent = to_bytes({name: 2 * tensor for name, tensor in from_bytes(sent).items()})
        if self.fault == "truncated":
            sent = sent[: len(sent) // 2]
        return sent, rms


@dataclass(frozen=True, kw_only=True)
class FaultyJob(RolloutJob):
    """A worker's job that goes wrong from version FAULTY on."""

    fault: str

    def serve(self, weights: Version, inbox: Any) -> Iterator[WorkerEvent]:
        faulty: Any = FaultyInbox(inbox, self.fault, _start)
        for event in RolloutJob.serve(replace(self, open_copy=self._faulty_copy), weights, faulty):
            if self.fault == "workers of a killed run" and isinstance(event, Result):
                drawn = event.completion
                if drawn.version.weights.version >= FAULTY:
                    drawn = replace(drawn, version=replace(drawn.version, run="killed-run"))
                yield replace(event, completion=drawn)
            else:
                yield event

    def _faulty_copy(self) -> Copy:
        copy: Any = self.open_copy()
        if not isinstance(copy, TorchCopy):
            return self._faulty_vllm(copy)
        engine = copy.engine
        _start.update({name: tensor.detach().clone() for name, tensor in delivered(engine.model).items()})
        publish = engine.publish

        def published(weights: Weights) -> None:
            if weights.version >= FAULTY:
                weights = self._go_wrong(engine, weights)
            publish(weights)

        engine.publish = published  # type: ignore[method-assign]
        if self.fault == "stale prefix cache":
            _keep_prefixes()
        return copy

    def _faulty_vllm(self, copy: Any) -> Copy:
        holding, lora, wrong = copy.holding, copy._lora, False

        def held(weights: Weights, name: str, payload: Any) -> Any:
            nonlocal wrong
            wrong = weights.version >= FAULTY
            if wrong and self.fault == "wrong scaling":
                copy.peft_config = replace(copy.peft_config, lora_alpha=16)
            if wrong and self.fault == "noise withheld":
                weights = replace(weights, sigma=0.0)
            return holding(weights, name, payload)

        copy.holding = held
        if self.fault == "not named":
            copy._lora = lambda prompt: None if wrong else lora(prompt)
        return copy

    def _go_wrong(self, engine: Any, weights: Weights) -> Weights:
        if self.fault == "noise withheld":
            return replace(weights, sigma=0.0)
        if self.fault == "not named":
            engine.merge._changes_weights = lambda: False  # so the base alone computes
        if self.fault == "wrong scaling":
            for adapted in engine.merge.layers:
                adapted.layer.scaling["default"] *= 2
        if self.fault == "merged twice":
            for adapted in engine.merge.layers:
                merged = {name: weight.clone() for name, weight in adapted.merged().items()}
                for name, weight in adapted.weights().items():
                    weight.data.copy_(merged[name])
        return weights


_start: dict[str, torch.Tensor] = {}
"""In a worker: what its engine holds before anything is sent."""


def _keep_prefixes() -> None:
    """The decode loop takes a prompt's keys, values and first logits from the last time that it saw the prompt."""
    kept: dict[tuple[int, ...], tuple[Any, Prefix]] = {}
    compute = Runner.prefill

    def prefill(self: Runner, groups: list[Any], size: tuple[int, int]) -> Any:
        cache = compute(self, groups, size)
        for group in groups:
            group.prefix.keep_own_copy()
            seen = group.logits, Prefix(group.prefix.length, group.prefix.states, [], copied=True)
            group.logits, prefix = kept.setdefault(group.token_ids, seen)
            group.prefix = replace(prefix)  # the loop empties it when it needs it no more
        return cache

    Runner.prefill = prefill  # type: ignore[method-assign]


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    steps: int
    line: str | None
    """That stopped it."""
    apart: float
    """Nats a token between the worker's log-probabilities and the trainer's, the last that is known."""


def make_base(folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    shape: Any = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, **shape
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return str(folder)


def open_trainer(base: str, folder: Path, rollout: RolloutConfig, **settings: Any) -> Any:
    """A trainer of LoRA on `base` with noise, whose completions workers draw.

    Args:
        settings: of the TrainingConfig.
    """
    model: Any = load_model(base)
    model.name_or_path = base
    fixed: dict[str, Any] = {
        "per_device_train_batch_size": PROMPTS * GROUP, "num_generations": GROUP, "max_completion_length": LENGTH,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "beta": 0.0, "seed": 11,
        "gradient_checkpointing": False, "use_cpu": True,
    }  # fmt: skip
    config = Config(
        training=TrainingConfig(output_dir=str(folder), **fixed | settings),
        peft=PeftConfig(type="lora", r=4, lora_alpha=8, target_modules="all-linear"),
        noise_injection=NoiseConfig(enabled=True, seed=3, sigma_start=0.1, sigma_end=0.05, num_stages=2),
        rollout=rollout,
    )
    return import_trainer()(
        config,
        model=model,
        train_dataset=Dataset.from_list([{"prompt": f"w{1100 + i} w1050 w{1060 + i}"} for i in range(PROMPTS)]),
        processing_class=make_tokenizer(),
        reward_funcs=[reward],
    )


def train(
    base: str,
    folder: Path,
    steps: int,
    fault: str | None,
    other: str = "",
    *,
    proof: bool = True,
    engine: Literal["fast", "vllm"] = "fast",
    bf16: bool = False,
) -> Outcome:
    """A training of `steps` steps with one worker.

    Args:
        other: folder of another base.
        proof: the answers' digests and names are looked at.
        bf16: trainer and worker compute in bfloat16.
    """
    trainer = open_trainer(
        base, folder, RolloutConfig(engine=engine, workers=1, piece_size=GROUP), vllm_max_model_length=64,
        max_steps=steps, learning_rate=1e-2 if fault else 1e-3, bf16=bf16,
    )  # fmt: skip
    pool_engine = trainer.step.engine
    open_pool = pool_engine._open_pool

    def faulty_pool() -> WorkerPool:
        pool = open_pool()
        job = {each.name: getattr(pool._job, each.name) for each in fields(RolloutJob)}
        if fault == "another base":
            make = job["open_copy"]
            job["open_copy"] = functools.partial(make.func, other, *make.args[1:], **make.keywords)
        pool._job = FaultyJob(**job, fault=str(fault))
        return pool

    if fault is not None:
        pool_engine._open_pool = faulty_pool
    line, look = None, training_pool.require_sent
    try:
        if not proof:
            training_pool.require_sent = lambda drawn, version: None
        with contextlib.redirect_stdout(None):
            trainer.train()
    except (UserError, RankError) as error:
        line = str(error)
    finally:
        training_pool.require_sent = look
        pool_engine.close()
    said = re.search(r"are (\S+) nats", line or "")
    logged = [row["rollout/engine_mismatch"] for row in trainer.state.log_history if "rollout/engine_mismatch" in row]
    return Outcome(trainer.state.global_step, line, float(said[1]) if said else max(logged, default=0.0))


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum((7 * i + 3) * token for i, token in enumerate(ids)) % 101 / 101 for ids in completion_ids]


def measure(fault: str, folder: Path, **how: Any) -> dict[str, Any]:
    """A row of the table."""
    base, other = make_base(folder / "base", 0), make_base(folder / "other", 1)
    at = {"another base": 0, "stale prefix cache": 1}.get(fault, FAULTY)
    stopped = train(base, folder / "run", FAULTY + 3, fault, other, **how)
    alone = train(base, folder / "run", FAULTY + 3, fault, other, proof=False, **how)
    return {
        "fault": fault,
        "step": at,
        "stopped_at": stopped.steps if stopped.line else None,
        "within_one_step": stopped.line is not None and at <= stopped.steps <= at + 1,
        "line": stopped.line,
        "nats": None if fault == "truncated" else alone.apart,
        "by_comparison_alone": alone.line is not None and fault != "truncated",
        "trl": FAULTS[fault],
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("fast", "vllm"), default="fast", help="of the worker")
    parser.add_argument("--only", nargs="*", choices=FAULTS, help="only these faults")
    parser.add_argument("--clean", type=int, default=1000, help="steps without a fault; 0: none")
    parser.add_argument("--bf16", action="store_true", help="trainer and worker compute in bfloat16")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    logging.disable(logging.WARNING)
    began = time.monotonic()
    rows, clean, how = [], Outcome(0, None, 0.0), {"engine": options.engine, "bf16": options.bf16}
    faults = [each for each in FAULTS if options.engine == "fast" or each not in NOT_OF_VLLM]
    with tempfile.TemporaryDirectory(prefix="delivery-") as name:
        for fault in options.only or faults:
            rows.append(measure(fault, Path(name) / fault.replace(" ", "_"), **how))
            print(f"{fault}: step {rows[-1]['stopped_at']}, {rows[-1]['nats']} nats: {rows[-1]['line']}", flush=True)
        if options.clean:
            base = make_base(Path(name) / "base", 0)
            clean = train(base, Path(name) / "clean", options.clean, None, **how)
    heads = [
        "fault",
        "from step",
        "nats a token",
        "stopped at",
        "by comparison alone",
        "the line",
        "TRL 1.16, by reading",
    ]
    print(markdown(heads, [
        [row["fault"], str(row["step"]), "nothing drawn" if row["nats"] is None else f"{row['nats']:.2g}",
         str(row["stopped_at"]), "yes" if row["by_comparison_alone"] else "no", str(row["line"]), row["trl"]]
        for row in rows
    ]))  # fmt: skip
    print(json.dumps({
        "benchmark": "delivery", "perl": perl.__version__, "engine": options.engine,
        "dtype": "bfloat16" if options.bf16 else "float32",
        "stopped": sum(row["within_one_step"] for row in rows),
        "injected": len(rows), "clean_steps": clean.steps, "false_alarms": int(clean.line is not None),
        "clean_nats": clean.apart, "seconds": round(time.monotonic() - began), "rows": rows,
    }))  # fmt: skip


if __name__ == "__main__":
    from benchmarks.delivery import main as run  # a job is pickled by the name of this module, not as __main__'s

    run()
