"""Methods that are no LoRA: vectors, shared shards, norms and rotations. PEFT's own, each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perl.adapters.lora import layers_of
from perl.base.errors import UserError

if TYPE_CHECKING:
    import peft

    from perl.config.schema import PeftConfig

EVERY = "all-linear"
IA3_LAYERS = ["k_proj", "v_proj", "down_proj"]
"""Keys, values and what the feed-forward network has inside: where (IA)^3 scales activations."""
FEED_FORWARD = ("down_proj", "fc2", "w2", "dense_4h_to_h")
"""Layers whose input is scaled, not their output."""
EVERY_NORM = r"(.*\.)?[^.]*norm[^.]*"
"""Modules whose own name holds "norm"."""


def vera(config: PeftConfig) -> peft.PeftConfig:
    """VeRA (arXiv 2310.11454): two trained vectors a layer scale one pair of frozen random matrices, which are saved
    with them."""
    from peft import VeraConfig

    return VeraConfig(
        task_type="CAUSAL_LM",
        r=config.r,
        vera_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        save_projection=True,
    )


def miss(config: PeftConfig) -> peft.PeftConfig:
    """MiSS (arXiv 2409.15371): one trained matrix [r, out] a layer, shared by blocks of r inputs."""
    from peft import MissConfig

    return MissConfig(**layers_of(config), r=config.r, miss_dropout=config.lora_dropout)


def ia3(config: PeftConfig) -> peft.PeftConfig:
    """(IA)^3 (arXiv 2205.05638): one trained vector a layer scales its output, of a feed-forward layer its input."""
    from peft import IA3Config

    targets: Any = IA3_LAYERS if config.target_modules == EVERY else config.target_modules
    named = FEED_FORWARD if isinstance(targets, str) else targets
    feed_forward = [name for name in named if name.rpartition(".")[2] in FEED_FORWARD]
    return IA3Config(**layers_of(config, targets), feedforward_modules=feed_forward)


def ln_tuning(config: PeftConfig) -> peft.PeftConfig:
    """The weights of norm layers (arXiv 2312.11420), which AQN perturbs while completions are sampled."""
    from peft import LNTuningConfig

    targets = EVERY_NORM if config.target_modules == EVERY else config.target_modules
    return LNTuningConfig(**layers_of(config, targets))


def start_ln_tuning(model: Any, config: PeftConfig, gather: Any) -> None:
    """PEFT trains copies of the norms in the base's own dtype, and in bfloat16 an update smaller than 1/512 of a weight
    is lost. They are raised to float32, as the weights of other adapters are; ZeRO-3 gathers weights of one dtype."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    require_norms(model, config)
    if not is_deepspeed_zero3_enabled():
        float32_norms(model)


def require_norms(model: Any, config: PeftConfig) -> None:
    """PEFT takes any layer that target_modules names, and would train all weights of a linear one."""
    from peft.tuners.ln_tuning.layer import LNTuningLayer
    from torch import nn

    for name, layer in model.named_modules():
        if isinstance(layer, LNTuningLayer) and isinstance(layer.base_layer, nn.Linear | nn.Embedding):
            raise UserError(
                f"--config.peft.target_modules: {name.removeprefix('base_model.model.')} is no norm, which is what"
                f" ln_tuning trains; leave the flag out, or write names of norms"
            )


def float32_norms(model: Any) -> None:
    """The trained norms in `model` in float32; what they compute keeps the dtype of their input."""
    from peft.tuners.ln_tuning.layer import LNTuningLayer

    for layer in model.modules():
        if isinstance(layer, LNTuningLayer):
            for norm in layer.ln_tuning_layers.values():
                norm.float().register_forward_hook(_dtype_of_input)


def _dtype_of_input(module: Any, inputs: Any, output: Any) -> Any:
    return output.to(inputs[0].dtype)


def hra(config: PeftConfig) -> peft.PeftConfig:
    """HRA (arXiv 2405.17484): r trained Householder reflections of a layer's input."""
    from peft import HRAConfig

    return HRAConfig(**layers_of(config), r=config.r)


def check_hra(config: PeftConfig, training: Any) -> None:
    if config.r % 2:
        raise UserError(
            f"--config.peft.r {config.r}: hra starts from pairs of equal reflections, which cancel; write an even"
            f" number, {config.r + 1}"
        )


def oft(config: PeftConfig) -> peft.PeftConfig:
    """OFT (arXiv 2306.07280): a trained rotation of each block of oft_block_size inputs of a layer."""
    from peft import OFTConfig

    return OFTConfig(**layers_of(config), r=0, oft_block_size=config.oft_block_size)


def check_blocks(model: Any, config: PeftConfig) -> None:
    """PEFT takes another size where the inputs of a layer can't be cut into blocks of oft_block_size, and has other
    matrices in an embedding."""
    from peft.tuners.oft.layer import OFTLayer

    for name, layer in model.named_modules():
        inputs: Any = layer.in_features if isinstance(layer, OFTLayer) else 0
        if isinstance(layer, OFTLayer) and hasattr(layer.get_base_layer(), "embedding_dim"):
            raise UserError(
                f"--config.peft.target_modules: {name.removeprefix('base_model.model.')} is an embedding, which oft"
                " can't train; leave it out"
            )
        if inputs % config.oft_block_size:
            raise UserError(
                f"--config.peft.oft_block_size {config.oft_block_size}: does not divide the {inputs} inputs"
                f" of {name.removeprefix('base_model.model.')}; write a number that divides those of all adapted layers"
            )
