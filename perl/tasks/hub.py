"""Rows of the Hugging Face Hub or of ModelScope, with one clear error where neither can be reached."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from perl.base.errors import UserError
from perl.models.folders import modelscope_variable
from perl.tasks.files import Row

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
    modelscope: str = ""
    """The repository's name on ModelScope, where it differs."""
    repeats: bool = False
    """The file holds the set many times over; exact repeats are dropped."""


def hub_rows(hub: Hub, split: str) -> Iterator[tuple[Row, str]]:
    """Yield (row, place) of one split. A copy in the local cache serves when the hub cannot be reached.

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
    if importlib.util.find_spec("modelscope") is None:
        raise UserError(f"{variable} is set, but modelscope is not installed; pip install modelscope, or unset it")
    from modelscope.msdatasets import MsDataset  # pyright: ignore[reportMissingImports]

    repo = hub.modelscope or hub.repo
    try:
        return iter(MsDataset.load(repo, subset_name=hub.config or "default", split=split))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{repo}: ModelScope did not give the data ({error}); give a local file or folder instead,"
            f" for example path/to/{hub.repo.split('/')[-1].lower()}/{split}.jsonl"
        ) from error
