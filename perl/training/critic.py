"""The critic of PPO (arXiv 1707.06347): the frozen base with LoRA of its own and a scalar head.

    values of a rollout   Passes.values        before the update, without noise: advantages and returns are made of them
    values in the update  Passes.score         the policy's log-probabilities and the values, in one pass of the model
    their loss            value_loss

Policy and critic read the same rows. In a packed sequence (perl.training.packing) the critic's copy of them stands
behind the policy's, so that one forward of the wrapped model computes both: DDP, ZeRO and FSDP2 meet one forward and
one backward, weights that are split are gathered once, and what gradient checkpointing repeats is what was computed.
Inside of a block each adapted layer gives the policy's tokens to PEFT and adds the critic's update to the others.

The critic's weights are no adapter of PEFT's, but one module of the policy's: what is saved, merged, sent to vLLM,
switched off for the reference or frozen by PEFT is the policy's adapter alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback
from transformers.utils import ModelOutput

from perl.base.errors import UserError
from perl.device.sharding import Gather, local, resharded, shard_of, whole
from perl.runs.checkpoints import CRITIC
from perl.training.packing import Packing

if TYPE_CHECKING:
    from perl.algorithms.algorithm import Scored
    from perl.config.schema import CriticConfig
    from perl.training.metrics import Metrics

SCALE = 2.0
"""Of the critic's update: lora_alpha / r of the group `peft`'s defaults."""


class LoRA(nn.Module):
    """LoRA (arXiv 2106.09685) of one linear layer: SCALE * B A x, where A starts as PEFT's does and B at 0."""

    def __init__(self, layer: nn.Linear, r: int, dtype: torch.dtype, generator: torch.Generator):
        super().__init__()
        a = torch.empty(r, layer.in_features, dtype=torch.float32, device="cpu")
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        self.a = nn.Parameter(a.to(dtype))
        self.b = nn.Parameter(torch.zeros(layer.out_features, r, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x.to(self.a.dtype), self.a), self.b) * SCALE


class ValueHead(nn.Module):
    """From a hidden state to its value, in float32 whatever the model computes in: a return is a sum, and bfloat16 has
    8 bits. It starts at 0, so that the first advantages are the rewards, and not the noise of a random head."""

    def __init__(self, hidden: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, tokens] of hidden states [rows, tokens, hidden]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), self.bias.float())[..., 0]


class CriticWeights(nn.Module):
    """All that is trained of a critic."""

    def __init__(self, layers: Sequence[nn.Linear], hidden: int, r: int, dtype: torch.dtype, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)  # the processes' own differ, and FSDP2 would mix their weights
        self.updates = nn.ModuleList(LoRA(layer, r, dtype, generator) for layer in layers)
        self.head = ValueHead(hidden, dtype)


@dataclass
class ValuedOutput(ModelOutput):
    """What the policy's forward returns where a sequence has a part of the critic's."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    """Both [1, tokens], of TRL's fused head."""

    state_values: torch.Tensor | None = None
    """float32 [1, N]: of the hidden states at CriticsPart.valued."""


class Critic:
    """Args:
        policy: a PeftModel whose micro-batches are packed (perl.training.packing.enable_packing); gets the critic's
            weights as its module `critic`, and computes with them where a sequence asks for it.
        config: the group `critic`.
        metrics: for the log.
        dtype: of the weights; ZeRO-3 gathers those of one dtype only.
        seed: of the weights.

    Attributes:
        weights: the module.
    """

    def __init__(
        self,
        policy: Any,
        config: CriticConfig,
        metrics: Metrics,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        self.policy, self.config, self.metrics = policy, config, metrics
        inner = policy.get_base_model()
        blocks = [_adapted_linears(block) for block in inner.base_model.layers]
        bases: list[Any] = [layer.get_base_layer() for layers in blocks for layer in layers]
        place = inner.get_output_embeddings().weight.device
        self.weights = CriticWeights(bases, inner.config.hidden_size, config.r, dtype, seed).to(place)
        policy.critic = self.weights
        updates: Any = iter(self.weights.updates)
        for block, layers in zip(inner.base_model.layers, blocks, strict=True):
            _compute_both(block, [(layer, next(updates)) for layer in layers])
        inner.base_model.register_forward_hook(self._value, with_kwargs=True, prepend=True)
        policy.register_forward_hook(self._hand_out_values, with_kwargs=True)
        self.warm_up = WarmUp(self)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.weights.parameters())

    def _value(self, backbone: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if (critics := _critics(kwargs)) is not None:
            kwargs["layout"].values = self.weights.head(output.last_hidden_state[:, critics.valued])

    def _hand_out_values(self, policy: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """DDP looks for what has a gradient in the output alone."""
        if _critics(kwargs) is None:
            return None
        return ValuedOutput(output.get("log_probs"), output.get("entropy"), kwargs["layout"].values)

    def targets(self, scored: Scored) -> torch.Tensor:
        """The returns of a generation batch, which the updates compare with: float32 [rows, tokens], NaN where a token
        has none."""
        assert scored.values is not None
        assert scored.generalized is not None
        (_, returns), mask = scored.generalized, scored.rewarded()
        self.metrics.add_returns(scored.values, returns, mask)
        return returns.masked_fill(~mask, math.nan)

    def loss(
        self, values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, tokens: float
    ) -> torch.Tensor:
        """The loss of a micro-batch: `value_loss` summed over its tokens, divided by `tokens`.

        Args:
            values, old: float32 [rows, tokens], by the critic as it is and before the updates.
            returns: float32 [rows, tokens], NaN where a token has none.
            mask: bool [rows, tokens].
            tokens: of the update, a process's share.
        """
        mask = mask & ~returns.isnan()
        returns = returns.masked_fill(~mask, 0.0)
        losses, clipped = value_loss(values, old, returns, self.config.value_clip)
        losses = losses.masked_fill(~mask, 0.0)
        self.metrics.mean("critic/vf_loss", losses.detach(), mask)
        self.metrics.mean("critic/vf_clipfrac", clipped, mask)
        self.metrics.mean("critic/vpred_mean", values.detach(), mask)
        return losses.sum() / tokens

    def own_group(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """`optimizer` with the critic's weights in a group of their own, at their own learning rate."""
        critics = {id(parameter) for parameter in self.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in critics]
        decay = optimizer.param_groups[0].get("weight_decay", 0.0)
        optimizer.add_param_group({"params": self.parameters(), "lr": float(self.config.lr), "weight_decay": decay})
        return optimizer

    def others(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of `model` that are not the critic's."""
        critics = {id(parameter) for parameter in self.parameters()}
        return [parameter for parameter in model.parameters() if id(parameter) not in critics]

    def policy_learns(self, step: int) -> bool:
        """Whether the policy is trained in optimizer step `step`, from 0."""
        return step >= self.config.warmup_steps

    def clip_apart(self, accelerator: Any, model: nn.Module, largest: float) -> torch.Tensor:
        """Clip the gradients of policy and critic to the norm `largest`, each by itself; the policy's norm, or the
        critic's where that is not finite: no update may be made of either then (perl.runs.nonfinite)."""
        policy_norm = whole(accelerator.clip_grad_norm_(self.others(model), largest))
        critic_norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters(), largest))
        self.metrics.mean("critic/grad_norm", critic_norm.detach())
        return torch.where(critic_norm.isfinite(), policy_norm, critic_norm)

    def save(self, folder: Path, gather: Gather, write: bool) -> None:
        """To perl.runs.checkpoints.CRITIC in `folder`. Every process must come here; the one with `write` writes."""
        with resharded(self.policy), gather(self.parameters()):
            tensors = {name: whole(p).cpu().contiguous() for name, p in self.weights.named_parameters()}
        if write:
            (folder / CRITIC).parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / CRITIC)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """What `save` wrote, into weights that are whole or split by FSDP2. A UserError for another critic's."""
        flag, saved = f"--config.training.resume_from_checkpoint {folder}", load_file(folder / CRITIC)
        with resharded(self.policy):
            parameters = dict(self.weights.named_parameters())
            if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in parameters.items()}:
                raise UserError(f"{flag}: its critic has other shapes; go on with the same --config.critic.r and model")
            for name, parameter in parameters.items():
                local(parameter).copy_(shard_of(saved[name], parameter))


def value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error, the larger one of the value and of it clipped to `old` ± `clip` (verl's
    compute_value_loss), of each token; and whether the clipped one counts."""
    losses = 0.5 * (values - returns).square()
    if clip is None:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    clipped = 0.5 * (torch.clamp(values, old - clip, old + clip) - returns).square()
    return torch.maximum(losses, clipped), clipped > losses


# Inside the model


def _adapted_linears(block: nn.Module) -> list[BaseTunerLayer]:
    return [
        module
        for module in block.modules()
        if isinstance(module, BaseTunerLayer) and isinstance(module.get_base_layer(), nn.Linear)
    ]


def _compute_both(block: nn.Module, layers: Sequence[tuple[Any, LoRA]]) -> None:
    """From now on `layers` of `block` heed a layout's critics, while the block runs: also when gradient checkpointing
    runs it again, as it hands on the same layout."""

    def enter(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (critics := _critics(kwargs)) is not None:
            for layer, update in layers:
                layer.forward = functools.partial(_forward_both, layer, update, critics.start)

    def leave(block: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if _critics(kwargs) is not None:
            for layer, _ in layers:
                vars(layer).pop("forward", None)

    block.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(leave, with_kwargs=True, always_call=True)


def _critics(kwargs: dict[str, Any]) -> Any:
    layout = kwargs.get("layout")
    return layout.critics if isinstance(layout, Packing) else None


def _forward_both(layer: Any, update: LoRA, start: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What an adapted layer makes of hidden states [1, tokens, in]: the policy's tokens stand before `start`."""
    critics = x[:, start:]
    valued = layer.get_base_layer()(critics)
    valued = (valued + update(critics)).to(valued.dtype)
    if not start:
        return valued
    stock: Any = type(layer).forward  # type: ignore[attr-defined]
    return torch.cat([stock(layer, x[:, :start], *args, **kwargs), valued], dim=1)


# Training


class WarmUp(TrainerCallback):
    """In the critic's first steps the policy has no gradient, so that an optimizer neither moves nor decays it.
    DeepSpeed keeps gradients of its own, which are 0 (Critic.policy_learns)."""

    def __init__(self, critic: Critic):
        self.critic = critic

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """How many steps the epochs have is known here at first."""
        if args.max_steps <= 0 and state.max_steps <= self.critic.config.warmup_steps:
            raise UserError(
                f"--config.critic.warmup_steps {self.critic.config.warmup_steps}: the training ends after step"
                f" {state.max_steps}, before the policy would learn; write less, or raise"
                " --config.training.num_train_epochs"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.critic.policy_learns(state.global_step):
            for parameter in self.critic.others(self.critic.policy):
                parameter.grad = None
