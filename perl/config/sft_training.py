"""`config.training` of perl.sft: TRL's SFTConfig, whole."""

from __future__ import annotations

from dataclasses import dataclass

from trl import SFTConfig

from perl.config.training import OnThisDevice


@dataclass
class SFTTrainingConfig(OnThisDevice, SFTConfig):
    """SFTConfig of the installed TRL."""
