"""LoRA and what differs from it by a scale, a magnitude, an optimizer or a frozen A: PEFT's LoraConfig for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perl.base.errors import UserError

if TYPE_CHECKING:
    import peft
    import torch

    from perl.config.schema import PeftConfig

AAT_JITTER = 1e-8
"""What PEFT's LoraFAOptimizer adds to the diagonal of A A^T before it inverts it."""


def layers_of(config: PeftConfig, targets: str | list[str] | None = None) -> dict[str, Any]:
    """Which layers of a causal language model have an adapter, as PEFT's configurations have it.

    Args:
        targets: in the place of config.target_modules.
    """
    exclude = config.exclude_modules or None
    return {"task_type": "CAUSAL_LM", "target_modules": targets or config.target_modules, "exclude_modules": exclude}


def lora(config: PeftConfig, **method: Any) -> peft.PeftConfig:
    """LoRA (arXiv 2106.09685): lora_alpha / r * B A on top of each weight, B zero at first."""
    from peft import LoraConfig

    fields = {"r": config.r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    return LoraConfig(**(layers_of(config) | fields | method))


def rslora(config: PeftConfig) -> peft.PeftConfig:
    """Rank-stabilised LoRA (arXiv 2312.03732): scale lora_alpha / sqrt(r)."""
    return lora(config, use_rslora=True)


def dora(config: PeftConfig) -> peft.PeftConfig:
    """Weight-decomposed LoRA (arXiv 2402.09353): a trained magnitude for each output."""
    return lora(config, use_dora=True)


def lora_plus_optimizer(
    model: torch.nn.Module, config: PeftConfig, optimizer_class: type, kwargs: dict[str, Any]
) -> torch.optim.Optimizer:
    """LoRA+ (arXiv 2402.12354): B learns lora_plus_lr_ratio times faster than A. The groups are those of PEFT's
    create_loraplus_optimizer, which has a rate of its own, 1e-6, for both matrices of an embedding."""
    ratio, groups = config.lora_plus_lr_ratio, []
    for matrix, factor in (("A", 1.0), ("embedding_A", 1.0), ("B", ratio), ("embedding_B", ratio)):
        found = [p for name, p in model.named_parameters() if p.requires_grad and f".lora_{matrix}." in name]
        groups.append({"params": found, "lr": factor * kwargs["lr"], "weight_decay": 0.0})
    return optimizer_class(groups, **kwargs)


def only_b_learns(model: Any, config: PeftConfig, gather: Any) -> None:
    """LoRA-FA (arXiv 2308.03303): A keeps its initial values, and B's gradient is multiplied by
    (A A^T)^-1 / scale^2, which makes the step of the weight B A the closest to full fine-tuning's.

    PEFT's LoraFAOptimizer does the same with an Adam of its own, which knows parameters by their names: neither
    DeepSpeed nor the user's choice of an optimizer can have it. Here the gradient is changed on its way, for any.
    """
    from peft.tuners.lora import LoraLayer

    require_no_embedding(model, config)
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        layer: Any = module
        layer.lora_A["default"].weight.requires_grad_(False)
        # PEFT trains all of an adapter, but for these, when it switches it on after a pass of the reference policy.
        layer.frozen_peft_weight_names = {"default": ("lora_A",)}
        layer.lora_B["default"].weight.register_hook(_Projection(layer, "default"))


def require_no_embedding(model: Any, config: PeftConfig) -> None:
    """PEFT has other matrices in an embedding: never freezes its A, and starts them otherwise."""
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and "default" in layer.lora_embedding_A:
            raise UserError(
                f"--config.peft.target_modules: {name.removeprefix('base_model.model.')} is an embedding, which"
                f" {config.type} can't train; leave it out"
            )


class _Projection:
    """g -> g (A A^T + 1e-8)^-1 / scale^2, float32 inside; of the A that the layer has then."""

    def __init__(self, layer: Any, name: str):
        self.layer, self.name = layer, name
        self._of: tuple[int, int] | None = None
        self._matrix: Any = None

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        import torch

        a = self.layer.lora_A[self.name].weight
        if self._of != (a.data_ptr(), a._version) or self._matrix.device != gradient.device:
            a32 = a.detach().float()
            jitter = AAT_JITTER * torch.eye(len(a32), device=a32.device)
            self._matrix = torch.linalg.pinv(a32 @ a32.T + jitter) / self.layer.scaling[self.name] ** 2
            self._of = a.data_ptr(), a._version
        return (gradient.float() @ self._matrix).to(gradient.dtype)
