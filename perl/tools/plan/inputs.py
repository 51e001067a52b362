"""What the arithmetic of memory.py starts from: the model's shape, out of config.json, and the job, out of a recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from perl.adapters import ADAPTERS
from perl.adapters.checks import check_stored
from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError, lookup
from perl.base.paths import user_path
from perl.config.derived import drawn_at_once, draws_alike, rows_stand
from perl.config.load import Config, Parsed
from perl.config.peft_fields import reads_of
from perl.config.schema import CriticConfig, PeftConfig
from perl.config.sft import SFTRunConfig
from perl.engines.quantised_base import check_drawn
from perl.models.few_bits import FIELDS, bits_of, described, fields_of, require_kernels
from perl.models.folders import from_hub, reason_of, require_sizes
from perl.tools.launch import accelerate_file
from perl.tools.plan.memory import GB, Device, Job, Parallel, Shape, peak, vllm_weights, worker_items

MODEL_FLAG = "--config.model.model_name_or_path"
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Of a layer of Llama's family; with others in it the formulas would count wrong."""
FLOAT_ADAMWS = ("adamw_torch", "adamw_torch_fused", "adamw_torch_npu_fused", "adamw_torch_xla")
"""Optimizers with two states of the parameters' dtype, on their device."""
KINDS = {"MULTI_NPU": ("npu",), "MULTI_GPU": ("cuda",), "DEEPSPEED": ("npu", "cuda"), "FSDP": ("npu", "cuda")}
"""An accelerate file's distributed_type -> kinds of device that it fits, where it does not say use_cpu."""
OF_OTHER_SHAPE = ("dora", "vera", "miss", "ia3", "ln_tuning", "hra", "oft")
"""Methods whose layers compute something else than B A x."""


def read_config(model: str) -> Any:
    """The PretrainedConfig of `model`: a folder, a config.json, or a hub name, of which this one file is fetched."""
    from transformers import AutoConfig

    path = user_path(model)
    folder = path if path.exists() else from_hub(model, MODEL_FLAG, ["config.json"])
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{MODEL_FLAG} {model}: no config.json in this folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{MODEL_FLAG} {file}: not a readable config.json: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{MODEL_FLAG} {file}: not a readable config.json: it holds no object")
    require_sizes(fields, f"{MODEL_FLAG} {file}")
    kind = fields.pop("model_type", None)
    if kind is None:
        raise UserError(f"{MODEL_FLAG} {file}: it names no model_type; write the config.json of a whole model")
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # each class of configuration has checks, and errors, of its own
        raise UserError(f"{MODEL_FLAG} {file}: transformers cannot read it: {reason_of(error)}") from error


def critic_of(config: Config | SFTRunConfig) -> CriticConfig | None:
    """The group `critic`, where there is an algorithm that has one."""
    if isinstance(config, SFTRunConfig) or not ALGORITHMS[config.algorithm.name].critic:
        return None
    return config.critic


def shape_of(config: Any, peft: PeftConfig, critic: CriticConfig | None = None) -> Shape:
    """The shape of the model that `config` describes with the adapter that `peft` does, or none, counted on the meta
    device: weights are never made. A UserError for a model that the formulas do not describe."""
    from peft import get_peft_model
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.get_text_config(decoder=True) is not config:
        raise UserError(f"{MODEL_FLAG}: {config.model_type} takes more than text; plan counts text models alone")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{MODEL_FLAG}: {config.model_type} is no causal language model")
    method = lookup(ADAPTERS, peft.type, "adapter type", "--config.peft.type")
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        with torch.device("meta"):
            model = kind(config)
            linears = dict(_linears(model))
            parameters = sum(parameter.numel() for parameter in model.parameters())
            adapter = method.build(peft)
            adapted = linears
            if adapter is not None:
                model = get_peft_model(model, adapter, low_cpu_mem_usage=True)
                adapted = dict(_linears(model, adapted=True))
    except UserError:
        raise
    except Exception as error:  # of transformers, torch and PEFT, each of its own
        reason = reason_of(error)
        raise UserError(f"{MODEL_FLAG}, --config.peft: this model cannot be made: {reason}") from error
    names = {name.rpartition(".")[2] for name in linears if ".layers.0." in name}
    if names != LINEARS:
        why = f"its layers are not Llama's ({', '.join(sorted(names)) or 'no linear ones'})"
        raise UserError(f"{MODEL_FLAG}: plan has no formulas for {config.model_type}: {why}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    first = next((name.partition(".layers.")[2].partition(".")[0] for name in adapted if ".layers." in name), "0")
    return Shape(
        parameters=parameters,
        linear=sum(inputs * outputs for inputs, outputs in linears.values()),
        outputs=sum(outputs for _, outputs in linears.values()),
        adapter=sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and _trains(method, name))
        + (sum(sum(size) for size in adapted.values()) * critic.r + config.hidden_size + 1 if critic else 0),
        adapted={name.rpartition(".")[2]: size for name, size in adapted.items() if f".layers.{first}." in name},
        rank=round(int(peft.r) / method.trained_share) if "r" in reads_of(peft.type) else 0,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        query=config.num_attention_heads * head_dim,
        key=config.num_key_value_heads * head_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        head_norms=any(name.endswith("q_norm") for name, _ in model.named_modules()),
    )


def _linears(model: Any, adapted: bool = False) -> Iterator[tuple[str, tuple[int, int]]]:
    """(in, out) of each linear layer; with `adapted`, of those below an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        layer: Any = module
        if adapted:
            layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else None
        if isinstance(layer, torch.nn.Linear):
            yield name, (layer.in_features, layer.out_features)


def _trains(method: Any, name: str) -> bool:
    """Whether a parameter of this name is trained: of what PEFT leaves trainable, lora_fa freezes a part."""
    return not method.trains or any(f".{kind}." in f"{name}." for kind in method.trains)


def quantised_fields(config: Config | SFTRunConfig, model: Any, strategy: str) -> dict[str, Any]:
    """The quantization_config that the base is loaded with: by model.quantization, else that of `model`, its
    PretrainedConfig; empty where there is none. A UserError where there are both, or `strategy` (as in check_method)
    would spread it."""
    check_stored(config, model, strategy)
    return dict(FIELDS) if config.model.quantization == "nf4" else fields_of(model)


def loaded_of(fields: Mapping[str, Any], config: Config | SFTRunConfig) -> str | None:
    """Key of LOADED. A UserError where its weights would be trained themselves."""
    if not fields or fields.get("quant_method", "bitsandbytes") != "bitsandbytes":
        return None
    if config.peft.type == "none":
        raise UserError(
            f"--config.peft.type none: the base is stored in {described(fields)}, and such weights can't be trained;"
            " write lora"
        )
    if bits_of(fields) == 4:
        return "4bit, nested" if fields.get("bnb_4bit_use_double_quant") else "4bit"
    return "8bit"


def job_of(
    config: Config | SFTRunConfig,
    parsed: Parsed,
    device: Device,
    count: int,
    parallel: Parallel,
    quantised: Mapping[str, Any] | None = None,
) -> Job:
    """The job that a configuration describes on `count` devices.

    Args:
        config: `parsed`, built for so many processes.
        quantised: as `quantised_fields` has it.
    """
    if config.model.quantization != "none":
        require_kernels(f"--config.model.quantization {config.model.quantization}", device.kind)
    training, full = config.training, config.peft.type == "none"
    dtype = config.model.dtype or ("float32" if device.cpu or full else "bfloat16")
    weight_bytes = 4 if dtype == "float32" else 2
    mixed = parsed.values.training.bf16 or parsed.values.training.fp16
    no_mixed = parsed.values.training.bf16 is False or device.cpu
    common: dict[str, Any] = {
        "micro_batch": training.per_device_train_batch_size,
        "accumulation": training.gradient_accumulation_steps,
        "processes": count,
        "parallel": parallel,
        "weight_bytes": weight_bytes,
        "compute_bytes": 2 if mixed or not no_mixed else weight_bytes,
        "checkpointing": training.gradient_checkpointing,
        "dropout": config.peft.lora_dropout > 0 and not full,
        "full": full,
        "loaded": loaded_of(quantised or {}, config),
    }
    if isinstance(config, SFTRunConfig):  # TRL's head is the same as in GRPO, over all tokens
        longest = _needed(config.training.max_length, "training.max_length", "row")
        rows = common["accumulation"]
        return Job(
            prompt=0, completion=longest, group=1, steps_per_generation=rows, engine=None, packed=False, **common
        )
    training, rollout = config.training, config.rollout
    check_drawn(config, device.kind, parallel)
    return Job(
        prompt=_needed(config.dataset.max_prompt_length, "dataset.max_prompt_length", "prompt"),
        completion=training.max_completion_length,
        group=int(training.num_generations or 1),
        steps_per_generation=int(training.steps_per_generation or training.gradient_accumulation_steps),
        by_batch_size=training.rollout_by == "generation_batch_size",
        max_tokens=training.max_tokens_per_microbatch,
        rows_stand=rows_stand(training),
        max_batch_tokens=None if rollout.max_batch_tokens is None else int(rollout.max_batch_tokens),
        engine=rollout.engine,
        workers=rollout.workers,
        piece=drawn_at_once(int(training.num_generations or 1), int(training.generation_batch_size or 1), rollout),
        alike=draws_alike(rollout),
        truncates=training.top_p < 1,
        packed=not training.torch_compile,
        greedy=ALGORITHMS[config.algorithm.name].greedy,
        critic=critic_of(config) is not None,
        vllm_share=training.vllm_share(rollout.workers, device.kind) if training.use_vllm else 0.0,
        vllm_sleeps=bool(training.vllm_enable_sleep_mode),
        vllm_devices=training.vllm_tensor_parallel_size,
        quantization=rollout.quantization,
        scores_quantised=bool(config.validation.quantized and config.validation.datasets),
        reference=full and (training.beta > 0 or config.algorithm.kl_in_reward > 0),
        **common,
    )


def _needed(longest: int | None, name: str, what: str) -> int:
    if longest is None:
        raise UserError(f"--config.{name} null: plan needs the longest {what}; write a number")
    return int(longest)


def rough(config: Config | SFTRunConfig, quantised: Mapping[str, Any]) -> Iterator[str]:
    """What of this configuration the arithmetic counts roughly or leaves out.

    Args:
        quantised: as `quantised_fields` has it.
    """
    training, peft = config.training, config.peft
    if quantised and loaded_of(quantised, config) is None:
        yield f"the base is stored in {described(quantised)}, and counted as if it were not quantised"
    if not isinstance(config, SFTRunConfig):
        if config.validation.datasets:
            yield "validation is left out: its completions have a KV cache of their own, of what is free then"
        compared = config.training.beta or config.algorithm.kl_in_reward
        if peft.adapter is not None and peft.adapter_mode == "continue" and compared:
            yield "the frozen copy of peft.adapter that KL compares with is left out, as large as the adapter"
    optimizer = str(getattr(training.optim, "value", training.optim))
    if optimizer not in FLOAT_ADAMWS:
        yield f"optimizer {optimizer} is counted as AdamW"
    if peft.type in OF_OTHER_SHAPE:
        yield f"{peft.type} is counted as lora of its size: what its layers compute in between differs"


def workers_room(shape: Shape, job: Job, device: Device) -> Iterator[str]:
    """What each worker holds, on a device of its own, or on a CPU in one memory with all others."""
    if not job.workers:
        return
    many = f"{job.processes} + {job.workers} {'processes' if device.cpu else 'devices'}: {job.workers} workers draw"
    if job.engine == "vllm":
        yield f"{many}; {_vllms(shape, job, device)}"
    else:
        table = worker_items(shape, job, device)
        cache = next((item.bytes for item in table if item.name == "KV cache"), 0)
        yield (
            f"{many}, {job.piece} completions at once; each holds {peak(table, 'rollout') / GB:.1f} GB,"
            f" {cache / GB:.1f} of it KV cache"
        )


def vllm_room(shape: Shape, job: Job, device: Device) -> Iterator[str]:
    """What vLLM's share leaves for its cache, in the trainer's process."""
    if job.vllm_share and not job.workers:
        yield _vllms(shape, job, device)


def _vllms(shape: Shape, job: Job, device: Device) -> str:
    share = int(job.vllm_share * device.memory)
    weights = vllm_weights(shape, job)
    left = share - weights
    what = f"leaves {left / GB:.1f} GB for its cache and activations"
    if left <= 0:
        what = f"is less than its weights, {weights / GB:.1f} GB"
    return f"vLLM's share of {share / GB:.1f} GB {what}"


def parallel_of(device: Device, count: int) -> Parallel:
    """How the launch script would share the work: ACCELERATE_CONFIG, else its own choice for the device."""
    chosen = os.environ.get("ACCELERATE_CONFIG")
    _, content = accelerate_file(device.kind, count)
    if count == 1 and not chosen:
        return "single"
    kinds = ("cpu",) if content.get("use_cpu") else KINDS.get(str(content.get("distributed_type")), (device.kind,))
    if device.kind not in kinds:
        raise UserError(
            f"ACCELERATE_CONFIG={chosen}: is for {' or '.join(kinds)}, this plan for {device.name}; name its --device,"
            " or unset it"
        )
    deepspeed = content.get("deepspeed_config")
    stage = deepspeed.get("zero_stage", 0) if isinstance(deepspeed, dict) else 0
    names: dict[str, Any] = {"DEEPSPEED": f"zero{stage}", "FSDP": "fsdp2"}
    return names.get(str(content.get("distributed_type")), "ddp")
