"""Configuration of an evaluation: every field of EvalConfig is a flag of perl/eval.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from perl.base.errors import UserError
from perl.base.paths import user_path
from perl.config.files import look_for
from perl.config.parser import Parser, descriptions
from perl.config.schema import EnvironmentConfig
from perl.config.types import NonNegativeFloat, NonNegativeInt, PositiveInt, UnitFloat


@dataclass
class EvalConfig:
    """Score a model, or a base model with an adapter, on tasks; data parallel, resumable.

    Args:
        model: folder or hub name of the model (with --adapter: of its base).
        dataset: what to score on, separated by commas: tasks (gsm8k, dapo-math, math500, aime24, aime25, amc23), hub
            names, files (parquet, json, jsonl, csv) or folders of them.
        result_dir: folder for the results, one folder a dataset in it; the same command again finishes what is missing.
        adapter: folder of a PEFT adapter. Several, or a training run's folder (all its checkpoints), are a sweep: each
            is scored into its own folder below --result_dir; `base` among them is the model without an adapter.
        adapter_mode: merge writes one model, checked against what PEFT computes; lora serves a LoRA adapter unmerged
            (--use_vllm only; slower on Ascend).
        use_vllm: generate with vLLM; without it with transformers.
        dp_size: how many copies of the model, each in its own process on its own device (on a CPU: its own cores).
        tp_size: devices that one copy is spread over (--use_vllm only).
        executor: local starts the workers on this machine, ray in a Ray cluster, one a NPU, GPU or CPU slot.
        ray_address: address of the cluster (--executor ray only); auto: RAY_ADDRESS, else the cluster that `ray start`
            began on this machine, else one that is started for this run.
        dtype: dtype to compute in; auto is the checkpoint's own, float32 on a CPU.
        quantization: as rollout.quantization of a training, of the merged model; with --adapter_mode lora of the base
            below the adapter, as in training; on a CPU or an NPU, or with --use_vllm.
        max_model_len: most tokens of prompt and completion together; default: what the model allows.
        max_batch_tokens: most tokens of KV cache at once; default: half of the memory that is free (transformers only).
        gpu_memory_utilization: share of the device's memory (on a CPU: of the machine's) that vLLM takes; default:
            vLLM's, 0.9 or 0.92, on a CPU up to 4 GiB of KV cache (--use_vllm only).
        enforce_eager: run vLLM without compiling and without captured graphs: slower, less memory and a shorter start;
            default: true on a CPU, where compiling takes longer than it saves, else false (--use_vllm only).
        split: split to score on; default: the task's own.
        task: grade every row as this task, whatever the row says.
        max_samples: only the first so many problems of each dataset.
        n: completions of each problem. This and the next four: default is the task's own.
        temperature: 0 is greedy.
        top_p: sample from the smallest set of tokens with this much probability.
        top_k: sample from the so many likeliest tokens; 0 is off.
        max_new_tokens: longest completion.
        seed: seed of the run; each completion's own follows from it, whatever the order and the devices.
        system_prompt: text of a system turn before each prompt that brings none; default: the task's own.
        chat_template_kwargs: what the model's chat template is given besides, as '{"enable_thinking": false}'; a
            training's training.chat_template_kwargs.
        few_shot: worked examples before each question: a number (the first ones of the dataset's train split), or a
            jsonl file of {"question", "answer"}.
        compare: result folder to compare with, problem by problem; writes compare.json.
        rescore: grade the completions in --result_dir again, with today's rules; nothing is generated, no other flag
            is needed.
        environment: the training's group of this name.
        report_to: wandb logs the scores to the W&B run of the adapter's training, or to a new one.
    """

    model: str
    dataset: str
    result_dir: str = "results"
    adapter: list[str] | None = None
    adapter_mode: Literal["merge", "lora"] = "merge"
    use_vllm: bool = False
    dp_size: PositiveInt = 1
    tp_size: PositiveInt = 1
    executor: Literal["local", "ray"] = "local"
    ray_address: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int8_w8a8", "int4", "fp8", "nvfp4"] = "none"
    max_model_len: PositiveInt | None = None
    max_batch_tokens: PositiveInt | None = None
    gpu_memory_utilization: UnitFloat | None = None
    enforce_eager: bool | None = None
    split: str | None = None
    task: str | None = None
    max_samples: PositiveInt | None = None
    n: PositiveInt | None = None
    temperature: NonNegativeFloat | None = None
    top_p: UnitFloat | None = None
    top_k: NonNegativeInt | None = None
    max_new_tokens: PositiveInt | None = None
    seed: NonNegativeInt = 0
    system_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    few_shot: str | None = None
    compare: str | None = None
    rescore: bool = False
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    report_to: Literal["none", "wandb"] = "none"

    @property
    def datasets(self) -> list[str]:
        return [name for part in self.dataset.split(",") if (name := part.strip())]


def build_parser() -> Parser:
    parser = Parser(
        prog="python perl/eval.py",
        description="Score a model, or a base model with an adapter, on tasks. Writes samples.jsonl and summary.json.",
    )
    switches = ("use_vllm", "enforce_eager", "rescore")
    parser.add_class_arguments(EvalConfig, as_group=False, skip={"adapter", "environment", *switches})
    parser.add_class_arguments(EnvironmentConfig, "environment")
    texts = descriptions(EvalConfig)
    parser.add_argument("--adapter", nargs="+", default=None, help=texts["adapter"])
    for name in switches:
        default = getattr(EvalConfig, name)
        parser.add_argument(f"--{name}", type=bool, nargs="?", const=True, default=default, help=texts[name])
    return parser


def parse(argv: Sequence[str]) -> EvalConfig:
    """Parse a command line. Raises UserError for anything that cannot be what the user meant."""
    parser = build_parser()
    if any(word.partition("=")[0] == "--rescore" for word in argv):
        parser.set_defaults(model="", dataset="")
        for action in parser._actions:
            action.required = False
    values = parser.parse_args(list(argv))
    given: dict[str, Any] = {name: values[name] for name in EvalConfig.__dataclass_fields__}
    given["environment"] = EnvironmentConfig(**values.environment.as_dict())
    config = EvalConfig(**given)
    if not config.rescore:
        check(config)
    return config


def check(config: EvalConfig) -> None:
    """Raise a UserError for flags that contradict each other or have no effect."""
    if not config.datasets:
        raise UserError("--dataset is empty; write a task such as gsm8k, or a file")
    if config.tp_size > 1 and not config.use_vllm:
        raise UserError(f"--tp_size {config.tp_size}: transformers keeps a model on one device; add --use_vllm")
    if config.ray_address != "auto" and config.executor != "ray":
        raise UserError(f"--ray_address {config.ray_address}: has no effect without --executor ray; add it")
    if config.max_batch_tokens and config.use_vllm:
        raise UserError("--max_batch_tokens: vLLM sizes its own cache; leave it out, or leave --use_vllm out")
    for flag, given in vllm_options(config).items():
        if not config.use_vllm:
            raise UserError(f"--{flag} {str(given).lower()}: is vLLM's; add --use_vllm, or leave it out")
    if config.gpu_memory_utilization == 0:
        raise UserError("--gpu_memory_utilization 0: nothing fits into no memory; write a share above 0, such as 0.8")
    check_environment(config.environment)
    if config.adapter_mode == "lora":
        if config.adapter is None:
            raise UserError("--adapter_mode lora: there is no --adapter to serve; write its folder after --adapter")
        if not config.use_vllm:
            raise UserError(
                "--adapter_mode lora: needs --use_vllm; with transformers leave it out (the adapter is merged)"
            )


def check_environment(environment: EnvironmentConfig) -> None:
    """Raise a UserError for a setting without what it is of."""
    unset = EnvironmentConfig()
    if not environment.used and environment != unset:
        name = next(f.name for f in fields(unset) if getattr(environment, f.name) != getattr(unset, f.name))
        raise UserError(
            f"--environment.{name}: has no effect without --environment.tools or --environment.factory; add one"
        )


def environment_flags(group: Mapping[str, Any]) -> list[str]:
    """The flags for a training's group `environment`, but for defaults; none where samples are one turn."""
    if not (group.get("tools") or group.get("factory")):
        return []
    defaults = asdict(EnvironmentConfig())
    return [
        word
        for name, value in group.items()
        if value != defaults.get(name)
        for word in (f"--environment.{name}", value if isinstance(value, str) else json.dumps(value))
    ]


def find_files(config: EvalConfig) -> tuple[EvalConfig, list[str]]:
    """With each path that is not in the working directory, but in the repository, taken from there; a line for it. In
    folders of results ~ is the home folder."""
    lines: list[str] = []

    def taken(name: str, flag: str) -> str:
        place, line = look_for(name, flag)
        lines.extend(line)
        return place

    found = replace(
        config,
        model=taken(config.model, "--model"),
        dataset=",".join(taken(name, "--dataset") for name in config.datasets),
        few_shot=config.few_shot and taken(config.few_shot, "--few_shot"),
        result_dir=str(user_path(config.result_dir)),
        compare=config.compare and str(user_path(config.compare)),
    )
    return found, lines


def vllm_options(config: EvalConfig) -> dict[str, float | bool]:
    """What the user has set of vLLM's own options, by their names there."""
    options: dict[str, float | bool] = {}
    if config.gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = float(config.gpu_memory_utilization)
    if config.enforce_eager is not None:
        options["enforce_eager"] = config.enforce_eager
    return options
