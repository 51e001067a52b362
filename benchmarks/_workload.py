"""What the benchmarks of training share: the model, its tokenizer and trainers, forced lengths, memory, the machine."""

from __future__ import annotations

import gc
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from perl.adapters import ADAPTERS
from perl.config.schema import NoiseConfig, PeftConfig, RolloutConfig
from perl.training.trainer import PerlGRPOTrainer

VOCABULARY = 16_384
PAD, EOS, FIRST_MARKER, FIRST_WORD = 0, 1, 2, 1026
PEFT = PeftConfig(type="lora", r=16, lora_alpha=32, target_modules="all-linear")


@dataclass(frozen=True)
class Workload:
    """Prompts of words, and the length in tokens of each of their completions, prompt by prompt."""

    prompts: list[list[int]]
    group_size: int
    lengths: list[int]
    longest: int

    @property
    def rows(self) -> list[list[int]]:
        """Each prompt as often as it is completed."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]


def draw_workload(
    prompts: int, group_size: int, prompt_length: int, kind: str, mean: float, longest: int, seed: int = 1
) -> Workload:
    """Random prompts of one length, and `draw_lengths` for their completions."""
    rng = random.Random(seed)
    texts = [[rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(prompt_length)] for _ in range(prompts)]
    lengths = draw_lengths(kind, prompts * group_size, mean, longest)
    return Workload(texts, group_size, lengths, max(lengths) if kind == "equal" else longest)


def draw_lengths(kind: str, count: int, mean: float, longest: int) -> list[int]:
    """Completion lengths in tokens: all `mean`, or log-normal with that mean (sigma 0.7), cut to 2..longest."""
    if kind == "equal":
        return [int(mean)] * count
    rng = random.Random(0)
    mu = math.log(mean) - 0.7**2 / 2
    return [min(longest, max(2, round(rng.lognormvariate(mu, 0.7)))) for _ in range(count)]


class ForcedLengths(LogitsProcessor):
    """Makes completion i exactly lengths[i] tokens long, the end-of-sequence token included.

    A loop may reorder rows, so each row carries its number: the first token drawn is forced to be a marker that
    neither prompts nor other draws contain. Completions of a prompt are numbered in the order in which they come.
    """

    def __init__(self, work: Workload):
        assert len(work.lengths) <= FIRST_WORD - FIRST_MARKER
        self.group_size = work.group_size
        self.first = {tuple(prompt): index * work.group_size for index, prompt in enumerate(work.prompts)}
        self.lengths = torch.tensor(work.lengths)
        self.started: Counter[tuple[int, ...]] = Counter()
        self.seconds = 0.0
        """Spent here so far."""

    def __call__(self, input_ids, scores):  # type: ignore[override]
        started = time.perf_counter()
        is_marker = (input_ids >= FIRST_MARKER) & (input_ids < FIRST_WORD)
        position = is_marker.int().argmax(dim=1)
        marked = is_marker.any(dim=1)
        scores[:, :FIRST_WORD] = float("-inf")
        for row in (~marked).nonzero()[:, 0].tolist():
            prompt = tuple(token for token in input_ids[row].tolist() if token != PAD)
            scores[row] = float("-inf")
            scores[row, FIRST_MARKER + self.first[prompt] + self.started[prompt] % self.group_size] = 0.0
            self.started[prompt] += 1
        numbers = input_ids.gather(1, position[:, None])[:, 0] - FIRST_MARKER
        drawn = input_ids.shape[1] - position
        last = marked & (drawn >= self.lengths[numbers.clamp(0, len(self.lengths) - 1)] - 1)
        scores[last] = float("-inf")
        scores[last, EOS] = 0.0
        self.seconds += time.perf_counter() - started
        return scores


def make_model() -> Qwen2ForCausalLM:
    """A 28 M Qwen2 in float32 with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
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
    return Qwen2ForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word "wi"."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w5000"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def wake_adapter(model: Any) -> None:
    """LoRA's B is zero at first; give it the size that it has in training, so that the adapter changes something."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1e-3)


def make_trainer(side: str, work: Workload, folder: str, reward: Any, **settings: Any) -> Any:
    """GRPOTrainer ("trl", "trl_cb": with continuous batching) or PerlGRPOTrainer ("ours"), with LoRA r 16 on all
    linears, on the workload's prompts.

    Args:
        settings: fields of GRPOConfig.
    """
    defaults = {
        "num_generations": max(2, work.group_size),
        "max_completion_length": work.longest,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "beta": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_transformers_continuous_batching": side == "trl_cb",
    }
    adapter = ADAPTERS[PEFT.type]
    extra: dict[str, Any] = {"peft_config": adapter.build(PEFT)}
    if side == "ours":
        noise = NoiseConfig(enabled=False, seed=0)
        extra = {"adapter": adapter, "adapter_config": PEFT, "noise": noise, "rollout": RolloutConfig(engine="fast")}
    trainer_class: Any = PerlGRPOTrainer if side == "ours" else GRPOTrainer
    trainer = trainer_class(
        model=make_model(),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=folder, **(defaults | settings)),
        train_dataset=Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in prompt) for prompt in work.prompts]}),
        processing_class=make_tokenizer(),
        **extra,
    )
    trainer.state.max_steps = 1000  # train() sets its own; a rollout outside of it asks too
    wake_adapter(trainer.model)
    return trainer


def force_lengths(trainer: Any, processor: ForcedLengths) -> None:
    """TRL passes no logits processors to `generate`; give it one."""
    base = trainer.model.get_base_model()
    plain = base.generate

    def generate(*args: Any, logits_processor: LogitsProcessorList | None = None, **kwargs: Any):
        return plain(*args, logits_processor=LogitsProcessorList([*(logits_processor or []), processor]), **kwargs)

    base.generate = generate


class Memory:
    """Memory of this process, from the kernel's books (Linux), in MB."""

    def __init__(self):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
        self.before = self._read("VmRSS")

    @staticmethod
    def _read(field: str) -> float:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[field].split()[0]) / 1024

    def peak(self) -> dict[str, float]:
        """The most that the process has held since this object was made, and how much more that is than then."""
        peak = self._read("VmHWM")
        return {"peak_mb": round(peak, 1), "added_mb": round(peak - self.before, 1)}


def measure_bandwidth(megabytes: int = 512) -> float:
    """Bytes a second that this process reads from memory, at most: the best of five sums over a large tensor, with
    the threads that torch has."""
    values = torch.ones(megabytes * 2**18)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - started)
    return values.numel() * 4 / best


def measure_flops(rows: int = 32) -> float:
    """Floating-point operations a second of a product of `rows` activations with weights of the model's size, the
    best of twenty, with the threads that torch has."""
    activations, weights = torch.randn(rows, 512), [torch.randn(1408, 512) for _ in range(20)]
    best = math.inf
    for weight in weights * 5:
        started = time.perf_counter()
        torch.nn.functional.linear(activations, weight)
        best = min(best, time.perf_counter() - started)
    return 2 * rows * 512 * 1408 / best
