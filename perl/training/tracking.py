"""Where metrics are sent besides metrics.jsonl: Weights & Biases online, offline or not at all, and tensorboard."""

from __future__ import annotations

import importlib.util
import logging
import netrc
import os
import sys
from pathlib import Path

from perl.config.load import Config
from perl.training.rundir import model_slug, redact

log = logging.getLogger(__name__)

TRUE = ("1", "true", "yes", "on")


def configure(config: Config, run_dir: Path, kind: str) -> None:
    """Settle `config.training.report_to` and the environment that W&B and tensorboard read.

    W&B is online when WANDB_API_KEY is set (or `wandb login` was run), else offline; WANDB_MODE, when set, decides.
    WANDB_DISABLED is honoured here, since transformers 5 no longer reads it.
    """
    wanted = config.training.report_to
    wanted = [wanted] if isinstance(wanted, str) else list(wanted or [])
    if "all" in wanted:
        wanted = ["wandb", "tensorboard"]
    wanted = [name for name in wanted if name != "none"]
    if "wandb" in wanted and os.environ.get("WANDB_DISABLED", "").lower() in TRUE:
        log.info("WANDB_DISABLED is set: nothing is sent to W&B")
        wanted.remove("wandb")
    for name in [n for n in ("wandb", "tensorboard") if n in wanted]:
        if importlib.util.find_spec(name) is None:
            log.warning("%s is not installed: metrics go to metrics.jsonl only (pip install %s)", name, name)
            wanted.remove(name)
    if "wandb" in wanted:
        os.environ.setdefault("WANDB_MODE", "online" if has_wandb_key() else "offline")
        os.environ.setdefault("WANDB_DIR", str(run_dir))
        project = f"grpo-lora-{model_slug(config.model.model_name_or_path).replace('_', '-')}-{kind}"
        os.environ["WANDB_PROJECT"] = config.logging.wandb_project or os.environ.get("WANDB_PROJECT") or project
        mode = os.environ["WANDB_MODE"]
        # A warning, since the script shows these on the screen: who expects a page of W&B would wait for it in vain.
        log.log(
            logging.INFO if mode == "online" else logging.WARNING,
            "W&B is %s, project %s%s",
            mode,
            os.environ["WANDB_PROJECT"],
            f"; send it later with wandb sync {run_dir}/wandb/offline-run-*" if mode == "offline" else "",
        )
        sys.argv = redact(sys.argv)  # W&B keeps the command line
    if "tensorboard" in wanted:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run_dir / "tensorboard"))
    config.training.report_to = wanted
    config.training.run_name = config.training.run_name or run_dir.name


def has_wandb_key() -> bool:
    """Whether W&B can log in without asking: a key in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
