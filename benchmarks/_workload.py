"""What the benchmarks of training share: models, their tokenizer and trainers, forced lengths, memory, the machine.

They compute on the accelerator where there is one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl import GRPOTrainer

from perl import device
from perl.adapters import ADAPTERS
from perl.config.load import Config
from perl.config.schema import AlgorithmConfig, DatasetConfig, NoiseConfig, PeftConfig, RolloutConfig
from perl.config.training import TrainingConfig
from perl.records import Completion, Prompt, Weights
from perl.training.trainer import PerlGRPOTrainer

VOCABULARY = 16_384
"""Words of the tokenizer; a model's vocabulary may be larger."""
PAD, EOS, FIRST_MARKER, FIRST_WORD = 0, 1, 2, 1026
PEFT = PeftConfig(type="lora", r=16, lora_alpha=32, target_modules="all-linear")


def _shape(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, tied: bool):
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
    }


MODELS: dict[str, dict[str, Any]] = {
    "tiny": _shape(VOCABULARY, 64, 128, 2, 4, 2, tied=True),
    "28m": _shape(VOCABULARY, 512, 1408, 7, 8, 2, tied=True),
    "qwen2.5-0.5b": _shape(151_936, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _shape(151_936, 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-7b": _shape(152_064, 3584, 18_944, 28, 28, 4, tied=False),
}
"""Shapes of Qwen2 models. The weights are random, which changes no speed."""


SWITCH: dict[str, bool | Literal["auto"]] = {"auto": "auto", "true": True, "false": False}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is trained, and how ours samples from it."""

    model: str
    """A key of MODELS."""
    dtype: Literal["float32", "bfloat16"]
    """Of the weights, by torch's name."""
    merge_adapter: bool | Literal["auto"]
    capture_graphs: bool | Literal["auto"]
    eos: tuple[int, ...] = (EOS,)
    """Tokens that end a completion; the first is the tokenizer's, and is never drawn if it is not in the vocabulary."""

    @classmethod
    def of(cls, options: argparse.Namespace) -> Policy:
        return cls(
            model=options.model,
            dtype=options.dtype,
            merge_adapter=SWITCH[options.merge_adapter],
            capture_graphs=SWITCH[options.capture_graphs],
        )


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a Policy: one default for all benchmarks."""
    parser.add_argument("--model", choices=MODELS, default="28m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--merge_adapter", choices=SWITCH, default="auto")
    parser.add_argument("--capture_graphs", choices=SWITCH, default="auto")


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
        self.lengths = self.lengths.to(numbers.device)
        last = marked & (drawn >= self.lengths[numbers.clamp(0, len(self.lengths) - 1)] - 1)
        scores[last] = float("-inf")
        scores[last, EOS] = 0.0
        self.seconds += time.perf_counter() - started
        return scores


def make_model(policy: Policy) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights, on the accelerator where there is one."""
    torch.manual_seed(0)
    eos: Any = list(policy.eos)
    config: Any = Qwen2Config(**MODELS[policy.model], pad_token_id=PAD, eos_token_id=eos, bos_token_id=None)
    with device.torch_device():
        return Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, policy.dtype))


def make_tokenizer(eos: int = EOS) -> PreTrainedTokenizerFast:
    """Token i is the word "wi", but for the end of a sequence, which is token `eos`."""
    words = {"<pad>": PAD} | {f"w{i}": i for i in range(1, VOCABULARY)} | {"<eos>": eos}
    words = {word: i for word, i in words.items() if i != eos or word == "<eos>"}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w5000"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def wake_adapter(model: Any, std: float = 1e-3, seed: int = 2) -> None:
    """LoRA's B is zero at first; give it the size that it has in training, so that the adapter changes something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def make_trainer(
    side: str,
    policy: Policy,
    work: Workload,
    folder: str,
    reward: Any,
    algorithm: AlgorithmConfig | None = None,
    **settings: Any,
) -> Any:
    """GRPOTrainer ("trl", "trl_cb": with continuous batching) or PerlGRPOTrainer ("ours"), with LoRA r 16 on all
    linears, on the workload's prompts.

    Args:
        algorithm: of ours; None: GRPO.
        settings: fields of GRPOConfig.
    """
    defaults = {
        "num_generations": max(2, work.group_size),
        "max_completion_length": work.longest,
        "use_cpu": device.detect().kind == "cpu",
        "bf16": policy.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "beta": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_transformers_continuous_batching": side == "trl_cb",
    }
    args = TrainingConfig(output_dir=folder, **(defaults | settings))
    extra: dict[str, Any] = {"args": args, "peft_config": ADAPTERS[PEFT.type].build(PEFT)}
    if side == "ours":
        rollout = RolloutConfig(engine="fast", merge_adapter=policy.merge_adapter, capture_graphs=policy.capture_graphs)
        extra = {"config": plain(args, rollout=rollout, algorithm=algorithm or AlgorithmConfig())}
    trainer_class: Any = PerlGRPOTrainer if side == "ours" else GRPOTrainer
    trainer = trainer_class(
        model=make_model(policy),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in prompt) for prompt in work.prompts]}),
        processing_class=make_tokenizer(policy.eos[0]),
        **extra,
    )
    trainer.state.max_steps = 1000  # train() sets its own; a rollout outside of it asks too
    wake_adapter(trainer.model)
    return trainer


def plain(args: TrainingConfig, **groups: Any) -> Config:
    """The adapter PEFT, no noise, prompts of any length.

    Args:
        groups: other groups of the configuration.
    """
    noise, data = NoiseConfig(enabled=False, seed=0), DatasetConfig(max_prompt_length=None)
    return Config(training=args, peft=PEFT, noise_injection=noise, dataset=data, **groups)


def force_lengths(trainer: Any, processor: ForcedLengths) -> None:
    """TRL passes no logits processors to `generate`; give it one, and ours to its decoder."""
    if hasattr(trainer, "step"):
        trainer.step.engine.decoder.processors = [processor]
        return
    base = trainer.model.get_base_model()
    plain = base.generate

    def generate(*args: Any, logits_processor: LogitsProcessorList | None = None, **kwargs: Any):
        return plain(*args, logits_processor=LogitsProcessorList([*(logits_processor or []), processor]), **kwargs)

    base.generate = generate


def draw(trainer: Any, work: Workload, longest: int | None = None) -> list[list[int]]:
    """The completions of a rollout of `work`, by TRL's trainer or by ours, as each draws them while it trains."""
    if not hasattr(trainer, "step"):
        return trainer._generate_single_turn(work.rows, None, {}, work.group_size)[0]
    engine, sampling = trainer.step.engine, trainer.step.collector.sampling
    if longest is not None:
        sampling = replace(sampling, max_new_tokens=longest)
    engine.publish(Weights(version=trainer.state.global_step, sigma=trainer.step.noise_stage.stage.sigma))
    seeds = itertools.count(1000 * trainer.state.global_step)
    prompts = [Prompt(token_ids=tuple(row), seed=next(seeds), sampling=sampling) for row in work.rows]
    completions = dict(engine.stream(prompts))
    return [list(completions[place].token_ids) for place in range(len(prompts))]


def around_rollouts(trainer: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have both called around the drawing of each rollout while `trainer` trains."""
    if hasattr(trainer, "step"):
        engine = trainer.step.engine
        stream = engine.stream

        def drawn(feed: Any) -> Any:
            before()
            yield from stream(feed)
            after()

        engine.stream = drawn
        return
    generate = trainer._generate_single_turn

    def generated(*args: Any, **kwargs: Any) -> Any:
        before()
        result = generate(*args, **kwargs)
        after()
        return result

    trainer._generate_single_turn = generated


def give(trainer: Any, completions: list[list[int]]) -> None:
    """Have every rollout of `trainer` be these completions."""
    if hasattr(trainer, "step"):
        given = [Completion(token_ids=tuple(ids), finish_reason="stop") for ids in completions]
        trainer.step.engine.stream = lambda feed: enumerate(given)
        return
    trainer._generate_single_turn = lambda *args, **kwargs: ([list(ids) for ids in completions], None)


class StepTimes(TrainerCallback):
    """Measures each optimizer step of a trainer: seconds of the whole and of its rollout, memory. `report` gets them,
    with the trainer's control, before the next step begins."""

    def __init__(self, trainer: Any, report: Callable[[dict[str, float], Any], None]):
        self.report = report
        self.rollout_s = 0.0
        around_rollouts(trainer, self._begin, self._end)
        trainer.add_callback(self)

    def _begin(self) -> None:
        self.begun = clock()

    def _end(self) -> None:
        self.rollout_s += clock() - self.begun

    def on_step_begin(self, args, state, control, **kwargs):
        self.memory, self.rollout_s, self.started = Memory(), 0.0, clock()
        self.cpu = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        wall = clock() - self.started
        seconds = {"wall_s": wall, "rollout_s": self.rollout_s, "update_s": wall - self.rollout_s}
        self.report(seconds | {"cpu_s": time.process_time() - self.cpu} | self.memory.peak(), control)


class Memory:
    """Memory in MB: of the accelerator in tensors, or of this process, from the kernel's books (Linux)."""

    def __init__(self):
        gc.collect()
        if device.detect().kind != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            self.before = torch.accelerator.memory_allocated() / 2**20
            return
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
        self.before = self._read("VmRSS")

    @staticmethod
    def _read(field: str) -> float:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[field].split()[0]) / 1024

    def peak(self) -> dict[str, float]:
        """The most that was held since this object was made, and how much more that is than then."""
        held = device.peak_memory()
        peak = self._read("VmHWM") if held is None else held.allocated / 2**20
        return {"peak_mb": round(peak, 1), "added_mb": round(peak - self.before, 1)}


def clock() -> float:
    """Seconds, once the accelerator has done what it was given."""
    device.synchronize()
    return time.perf_counter()


def measure_bandwidth(megabytes: int = 512) -> float:
    """Bytes a second that this process reads from memory, at most: the best of five sums over a large tensor, with
    the threads that torch has."""
    values = torch.ones(megabytes * 2**18, device=device.torch_device())
    best = math.inf
    for _ in range(5):
        started = clock()
        values.sum()
        best = min(best, clock() - started)
    return values.numel() * 4 / best


def decode_bytes(policy: Policy, rows: int, context: float) -> float:
    """Bytes that a decode step reads at least: the weights once, and the keys and values of `rows` rows of `context`
    tokens. The adapter, merged or not, is below a hundredth of that and not counted."""
    shape = MODELS[policy.model]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kept = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    linear = 2 * hidden * (hidden + kept) + 3 * hidden * shape["intermediate_size"]
    weights = layers * linear + shape["vocab_size"] * hidden
    return getattr(torch, policy.dtype).itemsize * (weights + rows * context * 2 * kept * layers)


def decode_flops(policy: Policy) -> float:
    """Operations of the linear layers for one token."""
    return 2 * decode_bytes(policy, 0, 0) / getattr(torch, policy.dtype).itemsize


def measure_flops(policy: Policy, rows: int = 32) -> float:
    """Floating-point operations a second of a product of `rows` activations with weights of the model's size, the
    best of twenty, with the threads that torch has."""
    inner, outer = (MODELS[policy.model][name] for name in ("hidden_size", "intermediate_size"))
    made: dict[str, Any] = {"device": device.torch_device(), "dtype": getattr(torch, policy.dtype)}
    activations, weights = torch.randn(rows, inner, **made), [torch.randn(outer, inner, **made) for _ in range(20)]
    best = math.inf
    for weight in weights * 5:
        started = clock()
        torch.nn.functional.linear(activations, weight)
        best = min(best, clock() - started)
    return 2 * rows * inner * outer / best
