"""Trackers of metrics: which are installed, how W&B is reached, and the W&B run that training and evaluation share."""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import json
import logging
import netrc
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from perl.base.errors import UserError
from perl.base.files import typed
from perl.base.paths import user_path
from perl.base.redact import hide, redact

log = logging.getLogger(__name__)

TRUE = ("1", "true", "yes", "on")
MODULES = {"azure_ml": "azureml", "flyte": "flytekit"}
"""Module that a value of report_to needs, where it is not called as the value."""
WANDB_RUN = "wandb_run.json"
"""File of a training's folder that names its W&B run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbRun:
    """A run of W&B, as wandb.init finds it again."""

    id: str
    project: str
    entity: str | None = None
    """User or team; None, as in an offline run, is the account's own."""

    def write(self, folder: Path) -> None:
        (folder / WANDB_RUN).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> WandbRun | None:
        """The run that `folder` names, or None. Raises UserError for a file that can't be read."""
        file = folder / WANDB_RUN
        if not file.is_file():
            return None
        try:
            return typed(json.loads(file.read_text(encoding="utf-8")), cls)
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: names no W&B run ({error}); delete it to start a new one") from error


def require_trackers(names: Iterable[str], flag: str) -> None:
    """Raise a UserError, naming `flag`, for the first tracker whose package is not installed."""
    for name in names:
        module = MODULES.get(name, name)
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{flag} {name}: {module} is not installed; pip install {module}, or write {flag} none")


def wandb_is_disabled() -> bool:
    """WANDB_DISABLED, which transformers 5 no longer reads."""
    return os.environ.get("WANDB_DISABLED", "").lower() in TRUE


def hide_from_wandb() -> None:
    """What W&B keeps of a process besides metrics: its command line, redacted; and the address of the git checkout that
    it runs in, whose user W&B would keep, unless a secret stands in it."""
    sys.argv = redact(sys.argv)
    command = ["git", "config", "--get", f"remote.{os.environ.get('WANDB_GIT_REMOTE', 'origin')}.url"]
    try:
        address = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return
    if hide(address) != address:
        os.environ.setdefault("WANDB_DISABLE_GIT", "true")
        log.info("W&B gets nothing of the git checkout: the address of its remote holds a secret")


def wandb_mode() -> str:
    """WANDB_MODE where it is set; else online with a key (WANDB_API_KEY, or after `wandb login`), offline without."""
    return os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")


def _has_wandb_key() -> bool:
    """Where W&B itself looks; its own question, wandb.login(prompt=False), also asks the server, which may be away."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    named = os.environ.get("NETRC")
    files = [named] if named else ["~/.netrc", "~/_netrc"]
    for file in map(user_path, files):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            return netrc.netrc(str(file)).authenticators(_wandb_host()) is not None
    return False


def _wandb_host() -> str:
    """WANDB_BASE_URL's, else that of `wandb login --host`, else the public one."""
    saved = configparser.ConfigParser()
    folder = os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
        saved.read(user_path(folder) / "settings")
    address = os.environ.get("WANDB_BASE_URL") or saved.get("default", "base_url", fallback="https://api.wandb.ai")
    return urlsplit(address).hostname or ""
