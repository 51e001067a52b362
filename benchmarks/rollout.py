"""Rollouts side by side with TRL's: one generation batch, the same model, prompts and lengths, interleaved pairs.

    python -m benchmarks.rollout [--pairs 5] [--group_size 8] [--lengths lognormal|equal] [--threads 1]

TRL's side is GRPOTrainer's own `_generate_single_turn` on its `model.generate` path, ours is `generate_completions`
on the same trainer's model inside TRL's own unwrapping. A logits processor forces each completion's length on both.
The last line is JSON: "ratio" is the median over pairs of TRL's wall time over ours, "cpu_ratio" the same of
processor time, which other programs on the machine disturb less, "…_memory_mb" how much a rollout adds to the
memory of a process at most (Linux).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

from perl.engines.decode import generate_completions
from perl.records import Sampling

VOCABULARY = 16_384
PAD, EOS, FIRST_MARKER, FIRST_WORD = 0, 1, 2, 514


class ForcedLengths(LogitsProcessor):
    """Makes completion i exactly lengths[i] tokens long, the end-of-sequence token included.

    A loop may reorder rows, so each row carries its number: the first token drawn is forced to be a marker that
    neither prompts nor other draws contain. Completions of a prompt are numbered in the order in which they come.
    """

    def __init__(self, prompts: list[list[int]], group_size: int, lengths: list[int]):
        self.first = {tuple(prompt): index * group_size for index, prompt in enumerate(prompts)}
        self.lengths = torch.tensor(lengths)
        self.started: Counter[tuple[int, ...]] = Counter()

    def __call__(self, input_ids, scores):  # type: ignore[override]
        is_marker = (input_ids >= FIRST_MARKER) & (input_ids < FIRST_WORD)
        position = is_marker.int().argmax(dim=1)
        scores[:, :FIRST_WORD] = float("-inf")
        for row in (~is_marker.any(dim=1)).nonzero()[:, 0].tolist():
            prompt = tuple(token for token in input_ids[row].tolist() if token != PAD)
            scores[row] = float("-inf")
            scores[row, FIRST_MARKER + self.first[prompt] + self.started[prompt]] = 0.0
            self.started[prompt] += 1
        numbers = input_ids.gather(1, position[:, None])[:, 0] - FIRST_MARKER
        drawn = input_ids.shape[1] - position
        last = is_marker.any(dim=1) & (drawn >= self.lengths[numbers.clamp(0, len(self.lengths) - 1)] - 1)
        scores[last] = float("-inf")
        scores[last, EOS] = 0.0
        return scores


def make_trainer(folder: str, max_new_tokens: int, group_size: int, prompts: int) -> Any:
    """A GRPOTrainer around a 28 M Qwen2 with LoRA r 16 on all linears."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=7,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w600"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=prompts * group_size,
        num_generations=max(2, group_size),
        max_completion_length=max_new_tokens,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w600"] * 64}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False),
    )


@contextlib.contextmanager
def with_processor(trainer: Any, processor: LogitsProcessor) -> Iterator[None]:
    """TRL passes no logits processors to `generate`; give it one."""
    base = trainer.model.get_base_model()
    plain = base.generate
    base.generate = lambda *args, **kwargs: plain(*args, logits_processor=LogitsProcessorList([processor]), **kwargs)
    try:
        yield
    finally:
        del base.generate


@dataclass(frozen=True)
class Workload:
    """One generation batch."""

    prompts: list[list[int]]
    group_size: int
    lengths: list[int]
    """Tokens of each completion, prompt by prompt."""
    longest: int


def run_trl(trainer: Any, work: Workload, processor: LogitsProcessor) -> list[list[int]]:
    repeated = [prompt for prompt in work.prompts for _ in range(work.group_size)]
    with with_processor(trainer, processor):
        return trainer._generate_single_turn(repeated, None, {}, work.group_size)[0]


def run_ours(trainer: Any, work: Workload, processor: LogitsProcessor) -> list[list[int]]:
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
        rows = generate_completions(
            model,
            work.prompts,
            work.group_size,
            Sampling(max_new_tokens=work.longest),
            range(len(work.lengths)),
            eos_token_ids=[EOS],
            pad_token_id=PAD,
            processors=[processor],
        )
    return [row.token_ids for row in rows]


SIDES = {"trl": run_trl, "ours": run_ours}


def measure(trainer: Any, work: Workload, side: str) -> tuple[float, float]:
    """Wall and processor seconds of one rollout."""
    processor = ForcedLengths(work.prompts, work.group_size, work.lengths)
    wall, cpu = time.perf_counter(), time.process_time()
    completions = SIDES[side](trainer, work, processor)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert [len(completion) for completion in completions] == work.lengths, side
    return wall, cpu


def memory_mb(field: str) -> float:
    """VmRSS (what this process holds now) or VmHWM (the most it has held) from the kernel's books."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def measure_memory(trainer: Any, work: Workload, side: str) -> float:
    """MB that a rollout adds to what the process held before, at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    before = memory_mb("VmRSS")
    measure(trainer, work, side)
    return memory_mb("VmHWM") - before


def memory_of(side: str) -> float:
    """`measure_memory` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.rollout", *sys.argv[1:], "--only", side]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["rollout_memory_mb"]


def draw_lengths(kind: str, count: int, mean: float, longest: int) -> list[int]:
    """Completion lengths in tokens: all `mean`, or log-normal with that mean (sigma 0.7), cut to 2..longest."""
    if kind == "equal":
        return [int(mean)] * count
    rng = random.Random(0)
    mu = math.log(mean) - 0.7**2 / 2
    return [min(longest, max(2, round(rng.lognormvariate(mu, 0.7)))) for _ in range(count)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--prompt_length", type=int, default=128)
    parser.add_argument("--lengths", choices=["lognormal", "equal"], default="lognormal")
    parser.add_argument("--mean", type=float, default=65)
    parser.add_argument("--longest", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=list(SIDES), help="one rollout of one side, for its memory")
    return parser.parse_args()


def compare(trainer: Any, work: Workload, pairs: int) -> dict[str, float]:
    """Times of both sides, alternating which goes first."""
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    for pair in range(pairs):
        for side in list(SIDES) if pair % 2 == 0 else list(SIDES)[::-1]:
            seconds, processor_seconds = measure(trainer, work, side)
            wall[side].append(seconds)
            cpu[side].append(processor_seconds)
        print(
            f"pair {pair}: trl {wall['trl'][-1]:.2f} s, ours {wall['ours'][-1]:.2f} s,"
            f" {wall['trl'][-1] / wall['ours'][-1]:.2f}x ({cpu['trl'][-1] / cpu['ours'][-1]:.2f}x in processor time)",
            flush=True,
        )

    def ratio(seconds: dict[str, list[float]]) -> float:
        return statistics.median(theirs / mine for theirs, mine in zip(seconds["trl"], seconds["ours"], strict=True))

    return {
        "trl_s": round(statistics.median(wall["trl"]), 3),
        "ours_s": round(statistics.median(wall["ours"]), 3),
        "cpu_ratio": round(ratio(cpu), 3),
        "ratio": round(ratio(wall), 3),
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    rng = random.Random(1)
    prompts = [
        [rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(options.prompt_length)] for _ in range(options.prompts)
    ]
    lengths = draw_lengths(options.lengths, options.prompts * options.group_size, options.mean, options.longest)
    work = Workload(prompts, options.group_size, lengths, options.longest)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, options.longest, options.group_size, options.prompts)
        if options.only:
            memory = measure_memory(trainer, work, options.only)
            print(json.dumps({"side": options.only, "rollout_memory_mb": round(memory, 1)}))
            return
        result = compare(trainer, work, options.pairs)
    memory = {f"{side}_memory_mb": memory_of(side) for side in SIDES}
    arguments = {name: value for name, value in vars(options).items() if name != "only"}
    print(json.dumps({"benchmark": "rollout", **arguments, "tokens": sum(lengths), **memory, **result}))


if __name__ == "__main__":
    main()
