"""Rollouts side by side with TRL's: one generation batch, the same model, prompts and lengths, interleaved pairs.

    python -m benchmarks.rollout [--pairs 5] [--group_size 8] [--lengths lognormal|equal] [--threads 1]

TRL's side is GRPOTrainer's own `_generate_single_turn` on its `model.generate` path, ours is `generate_completions`
on the same trainer's model inside TRL's own unwrapping. A logits processor forces each completion's length on both.
The last line is JSON: "ratio" is the median over pairs of TRL's wall time over ours, "cpu_ratio" the same of
processor time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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


def run_trl(trainer: Any, prompts: list[list[int]], group_size: int, processor: LogitsProcessor):
    repeated = [prompt for prompt in prompts for _ in range(group_size)]
    with with_processor(trainer, processor):
        return trainer._generate_single_turn(repeated, None, {}, group_size)[0]


def run_ours(trainer: Any, prompts: list[list[int]], group_size: int, processor: LogitsProcessor, limit: int):
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
        rows = generate_completions(
            model,
            prompts,
            group_size,
            Sampling(max_new_tokens=limit),
            range(len(prompts) * group_size),
            eos_token_ids=[EOS],
            pad_token_id=PAD,
            processors=[processor],
        )
    return [row.token_ids for row in rows]


def draw_lengths(kind: str, count: int, mean: float, longest: int) -> list[int]:
    """Completion lengths in tokens: all `mean`, or log-normal with that mean (sigma 0.7), cut to 2..longest."""
    if kind == "equal":
        return [int(mean)] * count
    rng = random.Random(0)
    mu = math.log(mean) - 0.7**2 / 2
    return [min(longest, max(2, round(rng.lognormvariate(mu, 0.7)))) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--prompt_length", type=int, default=128)
    parser.add_argument("--lengths", choices=["lognormal", "equal"], default="lognormal")
    parser.add_argument("--mean", type=float, default=65)
    parser.add_argument("--longest", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    rng = random.Random(1)
    prompts = [
        [rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(options.prompt_length)] for _ in range(options.prompts)
    ]
    lengths = draw_lengths(options.lengths, options.prompts * options.group_size, options.mean, options.longest)
    ratios, cpu_ratios = [], []
    seconds, cpu_seconds = {"trl": [], "ours": []}, {"trl": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, options.longest, options.group_size, options.prompts)
        sides = {
            "trl": lambda processor: run_trl(trainer, prompts, options.group_size, processor),
            "ours": lambda processor: run_ours(trainer, prompts, options.group_size, processor, options.longest),
        }
        for pair in range(options.pairs):
            for name in ("trl", "ours") if pair % 2 == 0 else ("ours", "trl"):
                processor = ForcedLengths(prompts, options.group_size, lengths)
                start, cpu_start = time.perf_counter(), time.process_time()
                completions = sides[name](processor)
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
                assert [len(completion) for completion in completions] == lengths, name
            ratios.append(seconds["trl"][-1] / seconds["ours"][-1])
            cpu_ratios.append(cpu_seconds["trl"][-1] / cpu_seconds["ours"][-1])
            print(
                f"pair {pair}: trl {seconds['trl'][-1]:.2f} s, ours {seconds['ours'][-1]:.2f} s, {ratios[-1]:.2f}x"
                f" ({cpu_ratios[-1]:.2f}x in processor time)",
                flush=True,
            )
    result = {
        "benchmark": "rollout",
        **vars(options),
        "tokens": sum(lengths),
        "trl_s": round(statistics.median(seconds["trl"]), 3),
        "ours_s": round(statistics.median(seconds["ours"]), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "ratio": round(statistics.median(ratios), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
