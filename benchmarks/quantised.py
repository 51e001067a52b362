"""A sampler's decode steps and its distance from the policy that is trained: float32 with the adapter merged, bfloat16,
and each rollout.quantization with the adapter above it. On one thread, in its processor time.

    python -m benchmarks.quantised MODEL PROMPTS.jsonl [--rows 64] [--tokens 64] [--batches 3] [--compared 192] [--r 16]
        [--sides "int8;int8_w8a8"]

MODEL is a folder, PROMPTS.jsonl has questions (`python -m perl real` has both). All linear layers get a LoRA adapter
whose update has --update of each weight's norm (one of a thousand steps or so). Each side draws the same prompts, eight
completions of each, by the same seeds, at temperature 1, and no row ends before the last token. KL is from what drew to
the trainer's policy in float32, which is computed again for each drawn token: over the whole vocabulary (`kl`), and of
the drawn tokens alone (`k3`, what a run logs as rollout/logp_kl), nats a token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from perl import device
from perl.config.schema import RolloutConfig
from perl.engines.quantised import SCHEMES
from perl.engines.torch_policy import TorchPolicyEngine, TorchRules
from perl.models.folders import load_model, load_tokenizer
from perl.records import Completion, Prompt, Sampling

GROUP = 8
"""Completions of a prompt."""
SIDES: dict[str, dict[str, Any]] = {
    "float32, merged": {},
    "bfloat16, merged": {"dtype": torch.bfloat16},
    **{name: {"quantization": name} for name in SCHEMES},
}


def main() -> None:
    variables = device.start_environment("cpu")
    if variables:  # as a training has them
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.quantised", *sys.argv[1:]], os.environ | variables)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--compared", type=int, help="rows whose KL is computed; default: all")
    parser.add_argument("--sides", default=";".join(SIDES))
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--update", type=float, default=0.01)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.model)
    policy = adapted(load_model(args.model, dtype=torch.float32), args.r, args.update)
    prompts = read_prompts(args.prompts, tokenizer, args.rows * args.batches, args.tokens)
    results = {}
    for name in args.sides.split(";"):
        engine = make_engine(policy, tokenizer, args, **SIDES[name])
        results[name] = measure(engine, prompts, args.rows, args.compared) | {"weights_mb": linear_bytes(engine) / 1e6}
        print(name, results[name], flush=True)
    print(json.dumps({"torch": torch.__version__, "rows": args.rows, "sides": results}))


def adapted(model: Any, r: int, update: float) -> Any:
    """`model` with a LoRA adapter on all linear layers, each update `update` of its weight's norm."""
    torch.manual_seed(0)
    policy: Any = get_peft_model(model, LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear")).eval()
    with torch.no_grad():
        for layer in policy.modules():
            if not hasattr(layer, "lora_A"):
                continue
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            b.normal_()
            b.mul_(update * layer.get_base_layer().weight.norm() / (layer.scaling["default"] * (b @ a).norm()))
    return policy


def read_prompts(file: Path, tokenizer: Any, count: int, tokens: int) -> list[Prompt]:
    """`count` prompts, each question's GROUP together, with a seed for each."""
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) * GROUP >= count, f"{file}: {len(lines)} rows, {count // GROUP} needed"
    prompts = []
    for seed in range(count):
        message = {"role": "user", "content": json.loads(lines[seed // GROUP])["question"]}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append(Prompt(token_ids=ids, seed=seed, sampling=Sampling(max_new_tokens=tokens)))
    return prompts


def make_engine(policy: Any, tokenizer: Any, args: Any, *, quantization: Any = "none", dtype: Any = None) -> Any:
    pad = tokenizer.pad_token_id or 0
    # A token that is never drawn ends a text, so that all rows are as long.
    generation = GenerationConfig(do_sample=True, max_new_tokens=args.tokens, eos_token_id=-1, pad_token_id=pad)
    rules = TorchRules(
        rollout=RolloutConfig(quantization=quantization), processing=tokenizer, generation_config=generation,
        generation_kwargs={}, dtype=dtype,
    )  # fmt: skip
    return TorchPolicyEngine(policy, rules)


def measure(engine: TorchPolicyEngine, prompts: list[Prompt], rows: int, compared: int | None) -> dict[str, float]:
    few = [replace(prompt, sampling=Sampling(max_new_tokens=2)) for prompt in prompts[:rows]]
    list(engine.stream(iter(few)))  # makes what is made once
    prefill = timed(engine, [replace(prompt, sampling=Sampling(max_new_tokens=1)) for prompt in prompts[:rows]])[0]
    seconds, sums = [], torch.zeros(4, dtype=torch.float64)
    for first in range(0, len(prompts), rows):
        batch = prompts[first : first + rows]
        taken, completions = timed(engine, batch)
        seconds.append(taken)
        left = len(prompts) if compared is None else max(0, compared - first)
        sums += distance(engine, batch[:left], completions)
    tokens = prompts[0].sampling.max_new_tokens
    typical = sorted(seconds)[len(seconds) // 2]
    kl, k3, apart, count = sums.tolist()
    of = max(count, 1.0)
    return {
        "tokens": int(count),
        "tokens_per_s": rows * tokens / typical,
        "decode_step_ms": 1000 * (typical - prefill) / (tokens - 1),
        "kl": kl / of,
        "k3": k3 / of,
        "logp_mismatch": apart / of,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


def timed(engine: TorchPolicyEngine, prompts: list[Prompt]) -> tuple[float, dict[int, Completion]]:
    started = time.process_time()  # of one thread, which other programs on the machine disturb less
    completions = dict(engine.stream(iter(prompts)))
    return time.process_time() - started, completions


@torch.no_grad()
def distance(engine: TorchPolicyEngine, prompts: list[Prompt], completions: dict[int, Completion]) -> torch.Tensor:
    """float64 [4], sums over the drawn tokens: KL(sampler || trainer), its estimate k3, |difference|, and how many."""
    sums = torch.zeros(4, dtype=torch.float64)
    rows = [(prompt.token_ids, completions[place]) for place, prompt in enumerate(prompts)]
    for ids, completion in rows:
        drawn = torch.tensor(completion.token_ids)
        whole = torch.tensor([[*ids, *completion.token_ids]])

        def logps(whole: torch.Tensor = whole, count: int = len(drawn)) -> torch.Tensor:
            logits = engine.model(input_ids=whole, logits_to_keep=count + 1).logits
            return F.log_softmax(logits[0, :-1].float(), dim=-1)

        trainer = logps()
        with engine.applied():
            sampler = logps()
        engine.take_metrics()
        at = trainer.gather(1, drawn[:, None])[:, 0]
        apart = (at - torch.tensor(completion.logprobs)).double()
        sums += torch.stack([
            (sampler.exp() * (sampler - trainer)).sum().double(),
            (apart.exp() - 1 - apart).sum(),
            apart.abs().sum(),
            torch.tensor(float(len(drawn)), dtype=torch.float64),
        ])  # fmt: skip
    return sums


def linear_bytes(engine: TorchPolicyEngine) -> int:
    """Of the linear layers as they draw, the head among them; of bfloat16 the float32 weights that stay besides."""
    made = engine.quantised.layers if engine.quantised else None
    layers = [m for name, m in engine.model.named_modules() if type(m) is torch.nn.Linear and "lora_" not in name]
    as_they_are = [layer for layer in layers if made is None or layer not in made.layers]
    return sum(layer.weight.nbytes for layer in as_they_are) + (made.nbytes if made else 0)


if __name__ == "__main__":
    main()
