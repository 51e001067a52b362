"""What the arithmetic of memory.py starts from: the model's shape, out of config.json, and the job, out of a recipe."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from perl.adapters import ADAPTERS, Adapter
from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError, lookup
from perl.base.paths import user_path
from perl.config.load import Config, Parsed
from perl.config.peft_fields import reads_of
from perl.config.schema import CriticConfig, PeftConfig
from perl.config.sft import SFTRunConfig
from perl.engines.cache import BLOCK_SIZE, KERNEL_BLOCK_SIZE
from perl.engines.decoder import unsupported_reason
from perl.models.folders import modelscope_variable
from perl.tools.launch import CONFIG_FOLDER, CONFIGS
from perl.tools.plan.memory import GB, Device, Job, Parallel, Shape
from perl.training.microbatches import why_fixed

MODEL_FLAG = "--config.model.model_name_or_path"
HUB_TIMEOUT_S = 5.0
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Of a layer of Llama's family; with others in it the formulas would count wrong."""
OF_OTHER_SHAPE = ("vera", "miss", "ia3", "ln_tuning", "hra", "oft")
"""Methods whose layers do not compute B A x."""


# config.json


def read_config(model: str) -> Any:
    """The PretrainedConfig of `model`: a folder, a config.json, or a hub name, of which this one file is fetched."""
    from transformers import AutoConfig

    where, text = _config_text(model)
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("it holds no object")
    except ValueError as error:
        raise UserError(f"{MODEL_FLAG} {where}: not a readable config.json: {error}") from error
    kind = fields.pop("model_type", None)
    if kind is None:
        raise UserError(f"{MODEL_FLAG} {where}: it names no model_type; write the config.json of a whole model")
    try:
        return AutoConfig.for_model(kind, **fields)
    except (ValueError, TypeError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{MODEL_FLAG} {where}: transformers cannot read it: {reason}") from error


def _config_text(model: str) -> tuple[str, str]:
    """Where config.json is, and what it holds."""
    path = user_path(model)
    if not path.exists():
        return model, _hub_text(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        return str(file), file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{MODEL_FLAG} {model}: no config.json in this folder") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{MODEL_FLAG} {file}: not a readable config.json: {error}") from error


def _hub_text(model: str) -> str:
    """config.json out of the hub's cache, or by one request: transformers would try again for half a minute."""
    if model.count("/") != 1 or model.startswith((".", "~", "/")):
        raise UserError(f"{MODEL_FLAG} {model}: no such folder; write a model's folder, its config.json, or a hub name")
    variable = modelscope_variable()
    try:
        if variable:
            from modelscope import model_file_download  # pyright: ignore[reportMissingImports]

            return Path(model_file_download(model, "config.json")).read_text(encoding="utf-8")
        from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.utils import build_hf_headers, get_session

        if isinstance(cached := try_to_load_from_cache(model, "config.json"), str):
            return Path(cached).read_text(encoding="utf-8")
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        url = hf_hub_url(model, "config.json")
        answer = get_session().get(url, headers=build_hf_headers(), timeout=HUB_TIMEOUT_S)
        answer.raise_for_status()
        return answer.text
    except ImportError as error:
        raise UserError(f"{MODEL_FLAG} {model}: {variable} is set, but modelscope is not installed") from error
    except Exception as error:  # the hubs have a class of error for each of a dozen causes
        raise UserError(
            f"{MODEL_FLAG} {model}: no such folder, and the hub gave no config.json ({type(error).__name__});"
            " write the path of a config.json"
        ) from error


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

    text = config.get_text_config(decoder=True)
    if text is not config:
        raise UserError(f"{MODEL_FLAG}: {config.model_type} takes more than text; plan counts text models alone")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{MODEL_FLAG}: {config.model_type} is no causal language model")
    try:
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            model = kind(config)
        _require_known(model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        linear = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, torch.nn.Linear))
        method = lookup(ADAPTERS, peft.type, "adapter type", "--config.peft.type")
        adapter = method.build(peft)
        if adapter is not None:
            with torch.device("meta"):
                model = get_peft_model(model, adapter, low_cpu_mem_usage=True)
    except (ValueError, RuntimeError, TypeError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(f"{MODEL_FLAG}, --config.peft: this model cannot be made: {reason}") from error
    adapted, trained = list(_adapted(model)), list(_adapted(model) if adapter else _linears(model))
    first = next((name for name, _ in trained if ".layers." in name), "")
    prefix = first.partition(".layers.")[0] + ".layers.0."
    return Shape(
        parameters=parameters,
        linear=linear,
        adapter=sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and _trains(method, name))
        + (sum(sum(size) for _, size in adapted) * critic.r + config.hidden_size + 1 if critic else 0),
        largest_adapted=max((math.prod(size) for _, size in adapted), default=0),
        adapted_weights=sum(math.prod(size) for _, size in adapted),
        adapted={name.rpartition(".")[2]: size for name, size in trained if name.startswith(prefix)},
        rank=round(int(peft.r) / method.trained_share) if "r" in reads_of(peft.type) else 0,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        head_norms=any(name.endswith("q_norm") for name, _ in model.named_modules()),
    )


def _require_known(model: Any) -> None:
    """Layers of Llama's family, which the decode loop serves too."""
    layers = [module for name, module in model.named_modules() if name.endswith(".layers.0")]
    linears = {
        name.rpartition(".")[2]
        for layer in layers
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    reason = unsupported_reason(model)
    if linears != LINEARS or reason:
        why = reason or f"its layers are not Llama's ({', '.join(sorted(linears)) or 'no linear ones'})"
        raise UserError(f"{MODEL_FLAG}: plan has no formulas for {model.config.model_type}: {why}")


def _linears(model: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name, (module.in_features, module.out_features)


def _adapted(model: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else None
        if isinstance(base, torch.nn.Linear):
            yield name, (base.in_features, base.out_features)


def _trains(method: Adapter, name: str) -> bool:
    """Whether a parameter of this name is trained: of what PEFT leaves trainable, lora_fa freezes a part."""
    return not method.trains or any(f".{kind}." in f"{name}." for kind in method.trains)


# The recipe


def job_of(config: Config | SFTRunConfig, parsed: Parsed, device: Device, count: int, parallel: Parallel) -> Job:
    """The job that a configuration describes on `count` devices.

    Args:
        config: `parsed`, built for so many processes.
    """
    full = config.peft.type == "none"
    dtype = config.model.dtype or ("float32" if device.cpu or full else "bfloat16")
    weight_bytes = 4 if dtype == "float32" else 2
    mixed = parsed.values.training.bf16 or parsed.values.training.fp16
    no_mixed = parsed.values.training.bf16 is False or device.cpu
    common: dict[str, Any] = {
        "micro_batch": config.training.per_device_train_batch_size,
        "accumulation": config.training.gradient_accumulation_steps,
        "processes": count,
        "parallel": parallel,
        "weight_bytes": weight_bytes,
        "compute_bytes": 2 if mixed or not no_mixed else weight_bytes,
        "checkpointing": config.training.gradient_checkpointing,
        "dropout": config.peft.lora_dropout > 0 and not full,
        "full": full,
    }
    return _tuning(config, common) if isinstance(config, SFTRunConfig) else _reinforcing(config, device, common)


def _tuning(config: SFTRunConfig, common: dict[str, Any]) -> Job:
    """Rows of max_length tokens, padded or packed to it: TRL's head is the same as in GRPO, over all tokens."""
    longest = config.training.max_length
    if longest is None:
        raise UserError("--config.training.max_length null: plan needs the longest row; write a number")
    rows = common["accumulation"]
    return Job(prompt=0, completion=longest, group=1, steps_per_generation=rows, engine=None, packed=False, **common)


def _reinforcing(config: Config, device: Device, common: dict[str, Any]) -> Job:
    training, rollout = config.training, config.rollout
    prompt = config.dataset.max_prompt_length
    if prompt is None:
        raise UserError("--config.dataset.max_prompt_length null: plan needs the longest prompt; write a number")
    capture = rollout.capture_graphs if isinstance(rollout.capture_graphs, bool) else device.captures
    bonus = bool(getattr(training, "entropy_coef", 0))
    fixed = why_fixed(training, bonus, aux_loss=False, images=False) is not None
    colocated = training.use_vllm and training.vllm_mode == "colocate"
    return Job(
        prompt=int(prompt),
        completion=int(training.max_completion_length or 256),
        group=int(training.num_generations or 1),
        steps_per_generation=int(training.steps_per_generation or training.gradient_accumulation_steps),
        max_tokens=None if fixed else training.max_tokens_per_microbatch,
        max_batch_tokens=None if rollout.max_batch_tokens is None else int(rollout.max_batch_tokens),
        engine=rollout.engine,
        block_size=KERNEL_BLOCK_SIZE if training.attention_kernels is True else BLOCK_SIZE,
        capture=bool(capture) and not device.cpu and common["parallel"] not in ("zero3", "fsdp2"),
        merge=rollout.merge_adapter is not False,
        truncates=training.top_p < 1,
        packed=not training.torch_compile,
        critic=critic_of(config) is not None,
        regrouped=not fixed,
        vllm_share=training.vllm_gpu_memory_utilization if colocated else 0.0,
        vllm_sleeps=bool(training.vllm_enable_sleep_mode),
        vllm_devices=training.vllm_tensor_parallel_size,
        reference=common["full"] and (training.beta > 0 or config.algorithm.kl_in_reward > 0),
        **common,
    )


def rough(config: Config | SFTRunConfig) -> Iterator[str]:
    """What of this configuration the arithmetic counts roughly or leaves out."""
    training, peft = config.training, config.peft
    if not isinstance(config, SFTRunConfig):
        yield from _rough_rollouts(config)
    optimizer = str(getattr(training.optim, "value", training.optim))
    if "adamw" not in optimizer:
        yield f"optimizer {optimizer} is counted as AdamW"
    if peft.type == "dora":
        yield "dora is counted as lora: its weights' norms take a matrix of each adapted layer's size for a moment"
    if peft.type in OF_OTHER_SHAPE:
        yield f"{peft.type} is counted as lora of its size: what its layers compute in between differs"
    if config.model.attn_implementation not in (None, "sdpa"):
        yield f"attention {config.model.attn_implementation} is counted as sdpa"


def _rough_rollouts(config: Config) -> Iterator[str]:
    if config.validation.datasets:
        yield "validation is left out: its completions have a KV cache of their own, of what is free then"
    compared = config.training.beta or config.algorithm.kl_in_reward
    if config.peft.adapter is not None and config.peft.adapter_mode == "continue" and compared:
        yield "the frozen copy of peft.adapter that KL compares with is left out, as large as the adapter"


def vllm_room(shape: Shape, job: Job, device: Device) -> Iterator[str]:
    """What vLLM's share leaves for its cache, in the trainer's process."""
    if job.vllm_share:
        share = int(job.vllm_share * device.memory)
        left = share - shape.parameters * job.sampled_bytes // job.vllm_devices
        what = f"leaves {left / GB:.1f} GB for its cache and activations" if left > 0 else "is less than its weights"
        yield f"vLLM's share of {share / GB:.1f} GB {what}"


def parallel_of(device: Device, count: int) -> Parallel:
    """How the launch script would share the work: ACCELERATE_CONFIG, else its own choice for the device."""
    chosen = os.environ.get("ACCELERATE_CONFIG")
    path = Path(chosen) if chosen else CONFIG_FOLDER / ("single.yaml" if count == 1 else CONFIGS[device.kind])
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        stage = (content.get("deepspeed_config") or {}).get("zero_stage", 0)
    except (OSError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"ACCELERATE_CONFIG={chosen}: not a readable YAML file; take one of {CONFIG_FOLDER}") from error
    if count == 1 and not chosen:
        return "single"
    names: dict[str, Any] = {"DEEPSPEED": f"zero{stage}", "FSDP": "fsdp2"}
    return names.get(content.get("distributed_type"), "ddp")
