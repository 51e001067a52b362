"""Rows of the Hugging Face Hub or of ModelScope, with one clear error where neither can be reached."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perl.base.errors import UserError
from perl.models.folders import modelscope_variable
from perl.tasks.files import SUFFIXES, Row

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Where a data set lies on the hub."""

    repo: str
    config: str | None = None
    train_split: str | None = None
    """None: not meant for training (a bench)."""
    eval_split: str
    known: bool = True
    """Whether the splits above are all there are."""
    modelscope: str
    """The repository's name on ModelScope; empty: none is known."""
    repeats: bool = False
    """The file holds the set many times over; exact repeats are dropped."""


def hub_rows(hub: Hub, split: str) -> Iterator[tuple[Row, str]]:
    """Yield (row, place) of one split. A copy in the local cache serves when the Hugging Face Hub cannot be reached.

    Raises a UserError when there is no such data set or split, or no connection and no cached copy.
    """
    splits = [name for name in dict.fromkeys((hub.train_split, hub.eval_split)) if name]
    if hub.known and split not in splits:
        raise UserError(f"{hub.repo}: no split {split!r}; splits: {', '.join(splits)}")
    variable = modelscope_variable()
    rows = _modelscope_rows(hub, split, variable) if variable else _huggingface_rows(hub, split)
    for number, row in enumerate(rows, start=1):
        yield dict(row), f"{hub.repo} {split}:{number}"


def _huggingface_rows(hub: Hub, split: str) -> Iterator[Row]:
    import datasets
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    reachable, why = True, ""
    try:
        _probe(hub.repo)
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{hub.repo}: the hub has no such data set (or it is private and HF_TOKEN is not set);"
            " give a local file instead, for example path/to/test.jsonl"
        ) from error
    except HFValidationError as error:
        raise UserError(f"{hub.repo}: not a name that the hub gives a data set; write owner/name") from error
    except ConnectionError as error:
        reachable, why = False, str(error)
    try:
        with contextlib.nullcontext() if reachable else _offline():
            data = datasets.load_dataset(hub.repo, hub.config, split=split)
    except (OSError, ValueError) as error:  # datasets raises these for no cache, no config and no split
        if reachable:
            raise UserError(f"{hub.repo}: {error}") from error
        raise UserError(
            f"{hub.repo}: the hub cannot be reached ({why}) and no cached copy was found; give a local file or folder"
            f" instead, for example path/to/{hub.repo.split('/')[-1].lower()}/{split}.jsonl"
        ) from error
    if not reachable:
        logger.warning("%s: the hub cannot be reached (%s); using the cached copy", hub.repo, why)
    return iter(data)  # pyright: ignore[reportReturnType]


def _probe(repo: str) -> None:
    """One request, without the minute of retries that `load_dataset` makes. Raises ConnectionError."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().dataset_info(repo, timeout=PROBE_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise
    except (OSError, httpx.HTTPError) as error:
        raise ConnectionError(" ".join(str(error).split())[:120] or type(error).__name__) from error


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """What HF_HUB_OFFLINE=1 does; both libraries read that variable when they are imported, which may be long ago."""
    from datasets import config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before


def _modelscope_rows(hub: Hub, split: str, variable: str) -> Iterator[Row]:
    """From a copy of the repository in ModelScope's cache. (modelscope's own reader of data sets needs an extra whose
    bounds exclude the `datasets` that is used here.)"""
    if not hub.modelscope:
        raise UserError(
            f"{hub.repo}: ModelScope has no copy that is known here; unset {variable}, or give its name there"
            " (owner/name) or a local file"
        )
    if importlib.util.find_spec("modelscope") is None:
        raise UserError(f"{variable} is set, but modelscope is not installed; pip install modelscope, or unset it")
    import datasets
    from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]

    wanted = ["README.md", *(f"*{suffix}" for suffix in SUFFIXES)]
    try:
        folder = Path(snapshot_download(hub.modelscope, repo_type="dataset", allow_patterns=wanted))
        place = (folder / hub.config, None) if hub.config and (folder / hub.config).is_dir() else (folder, hub.config)
        return iter(datasets.load_dataset(str(place[0]), place[1], split=split))  # pyright: ignore[reportReturnType]
    except Exception as error:  # modelscope has a class of error for each of a dozen causes
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(
            f"{hub.modelscope}: ModelScope did not give the data ({why}); give a local file or folder instead,"
            f" for example path/to/{hub.repo.split('/')[-1].lower()}/{split}.jsonl"
        ) from error
