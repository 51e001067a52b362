"""How a process computes, its device apart. A worker takes it over from its trainer: else its numbers have other last
bits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "HCCL_DETERMINISTIC")
"""That training.full_determinism sets. (Those by which the host waits for each kernel change no number.)"""


@dataclass(frozen=True, slots=True)
class Numerics:
    """As one process has them, for another one to take."""

    threads: int
    """Of a CPU: a sum that is divided otherwise has other last bits."""
    deterministic: bool
    """Deterministic algorithms (training.full_determinism)."""
    warn_only: bool
    float32: str
    """Of products (training.tf32)."""
    variables: dict[str, str]

    @classmethod
    def now(cls, threads: int) -> Numerics:
        """Of this process, but for its threads."""
        import torch

        return cls(
            threads=threads,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            float32=_backends().fp32_precision if _has_precision() else torch.get_float32_matmul_precision(),
            variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        )

    def take(self) -> None:
        """Have this process compute so. Nothing may have been computed on an accelerator before."""
        import torch

        os.environ.update(self.variables)
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.deterministic
        if _has_precision():
            _backends().fp32_precision = self.float32
        else:
            torch.set_float32_matmul_precision(self.float32)


def _backends() -> Any:
    import torch

    return torch.backends


def _has_precision() -> bool:
    """From torch 2.9 on; transformers sets it for training.tf32."""
    return hasattr(_backends(), "fp32_precision")
