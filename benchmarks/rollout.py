"""Rollouts side by side with TRL's: one generation batch, the same model, prompts and lengths, interleaved pairs.

    python -m benchmarks.rollout [--pairs 5] [--group_size 8] [--lengths lognormal|equal] [--threads 1] [--peers]
    python -m benchmarks.rollout --model qwen2.5-0.5b --dtype bfloat16 [--capture_graphs true|false]

"trl" is GRPOTrainer and "ours" PerlGRPOTrainer (engine fast), each as it draws them while it trains, so with all
that a rollout costs in training. A logits processor forces each completion's length on both ("forced_share" is its
share of the time). With --peers one round each of TRL with continuous batching and of vLLM on the merged model, where
the lengths are bounds on each request. Every side is a process of its own, and its first round is not counted.
The last line is JSON: "ratio" is the median over pairs of TRL's seconds over ours, "cpu_ratio" that of processor time,
which other programs on the machine disturb less, "…_peak_mb" the most memory that
a side's process held in a rollout (on an accelerator: its tensors), "…_added_mb" how much of that the rollout added.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._side import Side, ratio, serve, take_turns
from benchmarks._workload import (
    PEFT,
    ForcedLengths,
    Memory,
    Policy,
    Workload,
    add_policy_arguments,
    clock,
    draw,
    draw_workload,
    force_lengths,
    make_model,
    make_tokenizer,
    make_trainer,
    wake_adapter,
)

PEERS = ("trl_cb", "vllm")


def check(work: Workload, completions: list[list[int]]) -> None:
    """The lengths of every group are the workload's."""
    found = [len(completion) for completion in completions]
    for start in range(0, len(found), work.group_size):
        group = slice(start, start + work.group_size)
        assert sorted(found[group]) == sorted(work.lengths[group]), (found, work.lengths)


def trainer_round(side: str, policy: Policy, work: Workload, folder: str) -> Callable[[], dict[str, Any]]:
    """A rollout by the trainer of `side`, as it does them while it trains."""
    batch = max(2, len(work.lengths))
    trainer = make_trainer(side, policy, work, folder, lambda completions, **_: None, per_device_train_batch_size=batch)
    trainer.model.train()
    processor = ForcedLengths(work)
    if side == "trl_cb":
        bound_requests(work)
    else:
        force_lengths(trainer, processor)

    def play() -> dict[str, Any]:
        memory, forced, started, cpu = Memory(), processor.seconds, clock(), time.process_time()
        completions = draw(trainer, work, work.longest)
        seconds, cpu = clock() - started, time.process_time() - cpu
        check(work, completions)
        trainer.state.global_step += 1
        return {
            "wall_s": seconds,
            "cpu_s": cpu,
            "forced_share": (processor.seconds - forced) / seconds,
            **memory.peak(),
        }

    return play


def bound_requests(work: Workload) -> None:
    """Continuous batching shows a logits processor no history: there each request gets its own length as its bound."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    plain = ContinuousBatchingManager.add_request

    def add_request(self, input_ids: Any, request_id: Any = None, **kwargs: Any):
        kwargs |= {"max_new_tokens": work.lengths[int(request_id.removeprefix("req_"))], "eos_token_id": -1}
        return plain(self, input_ids, request_id, **kwargs)

    ContinuousBatchingManager.add_request = add_request  # type: ignore[method-assign]


def vllm_round(policy: Policy, work: Workload, folder: str) -> Callable[[], dict[str, Any]]:
    """A rollout by vLLM with the adapter merged. Handing it the new weights, which each step of training needs, is
    not in its time."""
    from peft import get_peft_model

    from perl.adapters import ADAPTERS
    from perl.engines.vllm import ENVIRONMENT

    config: Any = ADAPTERS[PEFT.type].build(PEFT)
    model: Any = get_peft_model(make_model(policy), config)
    wake_adapter(model)
    model.merge_and_unload().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    del model
    gc.collect()
    for name, value in (ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"}).items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    context = len(work.prompts[0]) + work.longest
    llm = LLM(folder, dtype=policy.dtype, max_model_len=context, max_num_seqs=256, max_num_batched_tokens=8192)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in work.rows]
    sampling = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True) for n in work.lengths]

    def play() -> dict[str, Any]:
        llm.reset_prefix_cache()  # the weights would be new ones
        memory, started = Memory(), clock()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = clock() - started
        check(work, [list(output.outputs[0].token_ids) for output in outputs])
        return {"wall_s": seconds, **memory.peak()}

    return play


def measure_peer(name: str, threads: int) -> dict[str, float]:
    """One counted round; TRL's continuous batching, which is slow on a CPU, is not warmed up."""
    side = Side("benchmarks.rollout", name, threads)
    try:
        if name == "vllm":
            side.round()
        answer = side.round()
    finally:
        side.close()
    print(f"{name}: {answer['wall_s']:.2f} s", flush=True)
    return {f"{name}_s": round(answer["wall_s"], 3), f"{name}_peak_mb": answer["peak_mb"]}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--prompt_length", type=int, default=128)
    parser.add_argument("--lengths", choices=["lognormal", "equal"], default="lognormal")
    parser.add_argument("--mean", type=float, default=65)
    parser.add_argument("--longest", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    add_policy_arguments(parser)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--side", choices=["trl", "ours", *PEERS], help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    work = draw_workload(
        options.prompts, options.group_size, options.prompt_length, options.lengths, options.mean, options.longest
    )
    if options.side:
        torch.set_num_threads(options.threads)
        with tempfile.TemporaryDirectory() as folder:
            policy = Policy.of(options)
            if options.side == "vllm":
                serve(vllm_round(policy, work, folder))
            else:
                serve(trainer_round(options.side, policy, work, folder))
        return
    sides = trl, ours = [Side("benchmarks.rollout", name, options.threads) for name in ("trl", "ours")]
    for side in sides:
        side.round()  # not counted
        side.answers.clear()
    take_turns(
        sides,
        options.pairs,
        lambda now: (
            f"trl {now[0]['wall_s']:.2f} s, ours {now[1]['wall_s']:.2f} s, {now[0]['wall_s'] / now[1]['wall_s']:.2f}x"
        ),
    )
    for side in sides:
        side.close()
    result: dict[str, Any] = {"benchmark": "rollout", "tokens": sum(work.lengths)}
    result |= {name: value for name, value in vars(options).items() if name != "side"}
    for side in sides:
        result[f"{side.name}_s"] = side.median("wall_s")
        result |= {f"{side.name}_{field}": side.most(field) for field in ("peak_mb", "added_mb")}
        result[f"{side.name}_forced_share"] = side.median("forced_share")
    for name in PEERS if options.peers else ():
        peer = measure_peer(name, options.threads)
        result |= peer | {f"{name}_ratio": round(peer[f"{name}_s"] / ours.median("wall_s"), 3)}
    print(json.dumps(result | {"cpu_ratio": ratio(trl, ours, "cpu_s"), "ratio": ratio(trl, ours)}))


if __name__ == "__main__":
    main()
