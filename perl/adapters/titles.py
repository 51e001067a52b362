"""Methods as their papers write them, for pages and cards."""

from __future__ import annotations

TITLES = {
    "lora": "LoRA",
    "rslora": "rsLoRA",
    "dora": "DoRA",
    "lora_plus": "LoRA+",
    "lora_fa": "LoRA-FA",
    "pissa": "PiSSA",
    "milora": "MiLoRA",
    "milora_plus": "MiLoRA+",
    "adalora": "AdaLoRA",
    "vera": "VeRA",
    "miss": "MiSS",
    "ia3": "(IA)³",
    "ln_tuning": "LN tuning",
    "hra": "HRA",
    "oft": "OFT",
    "none": "all weights",
}
"""By `config.peft.type`; others stand as it has them. By PEFT's peft_type in lower case too."""
SPELLED = ("rsLoRA", "HRA", "LN tuning")
"""Titles that begin with the name of a letter, which begins with a vowel."""


def with_article(title: str) -> str:
    """A LoRA, An OFT, An (IA)³."""
    return f"{'An' if title.lstrip('(')[:1] in 'AEIO' or title in SPELLED else 'A'} {title}"
