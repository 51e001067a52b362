"""How large the noise is for the weights that it is added to."""

from __future__ import annotations

from collections.abc import Sequence

from perl.config.schema import NoiseConfig

LARGEST = 0.1
"""Relative sigma above which a run warns: with 0.22 (sigma 0.05 on SmolLM2-135M's post_attention_layernorm) the reward
was next to 0 for the first twenty steps."""
SMALL = 0.02
"""Relative sigma that the warning proposes."""


def relative_sigmas(sigmas: Sequence[float], rms: Sequence[float]) -> list[float] | None:
    """Each layer's standard deviation of the noise over the root mean square of its clean weights; None where that is
    not known, or 0 for a layer."""
    return [sigma / layer for sigma, layer in zip(sigmas, rms, strict=True)] if rms and all(rms) else None


def size_metrics(sigmas: Sequence[float], rms: Sequence[float]) -> dict[str, float]:
    """aqn/sigma_relative, the mean over the layers, and aqn/sigma_relative_max, of the layer where it is largest."""
    shares = relative_sigmas(sigmas, rms)
    if shares is None:
        return {}
    return {"aqn/sigma_relative": sum(shares) / len(shares), "aqn/sigma_relative_max": max(shares)}


def size_warning(config: NoiseConfig, names: Sequence[str], rms: Sequence[float]) -> str | None:
    """One line where sigma_start is more than LARGEST of the weights, on average over the layers; else None.

    Args:
        names: of the layers.
        rms: root mean square of each one's clean weights.
    """
    sigma = config.sigma_start
    shares = relative_sigmas([sigma * layer if config.relative else sigma for layer in rms], rms)
    if shares is None or (share := sum(shares) / len(shares)) <= LARGEST:
        return None
    kinds = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
    if config.relative:
        message = f"noise_injection.relative: sigma_start is {sigma:g} of the RMS of {kinds} weights"
        flags = (("sigma_start", SMALL),)
    else:
        typical = sigma / share  # harmonic mean of the layers': sigma over it is the mean of the relative sigmas
        spread = "" if min(rms) == max(rms) else f" ({min(rms):.2g} to {max(rms):.2g} by layer)"
        message = (
            f"noise_injection: {kinds} weights of this model have an RMS of {typical:.2g}{spread}:"
            f" sigma_start {sigma:g} is {share:.2g} of it"
        )
        flags = (("sigma_start", SMALL * typical),)
    if config.schedule != "target_kl" and config.sigma_end > flags[0][1]:
        flags += (("sigma_end", flags[0][1] / 100),)
    instead = " ".join(f"--config.noise_injection.{name} {value:.2g}" for name, value in flags)
    relative = "" if config.relative else " or --config.noise_injection.relative true"
    return f"{message}, which can silence the reward; write {instead}{relative}"
