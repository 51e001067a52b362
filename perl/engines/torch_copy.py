"""perl's decode loop in a worker of a training: it draws with the policy that the trainer has sent, and tells what it
holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from peft import get_peft_model

from perl import device
from perl.adapters.delivery import base_digest, digest, from_bytes, put_into
from perl.engines.torch_policy import TorchPolicyEngine, TorchRules
from perl.models.folders import load_model
from perl.noise.injector import NoiseInjector
from perl.records import Weights

if TYPE_CHECKING:
    from perl.config.schema import NoiseConfig


class TorchCopy:
    """The base loaded again, with an adapter like the trainer's, whose tensors are those that were sent last.

    Args:
        model: folder of the base.
        load: further arguments of perl.models.folders.load_model.
        peft_config: of the adapter; None: all weights are trained, and sent.
        noise: the group `noise_injection`; None: no noise.
    """

    def __init__(
        self,
        model: str,
        *,
        rules: TorchRules,
        load: Mapping[str, Any],
        peft_config: Any,
        noise: NoiseConfig | None,
    ):
        policy: Any = load_model(model, **load).eval().to(device.torch_device())
        if peft_config is not None:
            policy = get_peft_model(policy, peft_config).eval()
        self.engine = TorchPolicyEngine(
            policy, rules, noise=None if noise is None else NoiseInjector.of(policy, noise), reserves=False
        )
        self.stream, self.close = self.engine.held().stream, self.engine.close
        self.max_num_seqs = self.engine.max_num_seqs
        self._base = base_digest(policy)

    @contextlib.contextmanager
    def holding(self, weights: Weights, name: str, payload: tuple[bytes, list[float]]) -> Iterator[str]:
        """See perl.workers.rollouts.Copy."""
        policy, noise = self.engine.model, self.engine.noise
        put_into(policy, from_bytes(payload[0]))
        if noise is not None:
            noise.rms[:] = payload[1]
        self.engine.publish(weights)
        with self.engine.holding():
            yield digest(policy, self._base, noise.held() if noise is not None else ())
