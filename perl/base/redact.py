"""What is a secret in a configuration, a command line or a text, and what stands in its place wherever a run writes.

By its name (hub_token, api_key), by its place (https://user:password@host, ?token=…), by its form (hf_…, sk-…), and by
its value, where the environment, the command line or its recipe says it under such a name. At the top stands the
standard library alone, as the supervisor and the doctor import this.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import TracebackType
from typing import Any
from urllib.parse import quote, quote_plus

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HIDDEN = "<secret>"
LEAST_LENGTH = 8
"""Characters of a value that is looked for in texts; a shorter one would be found everywhere."""
SECRET_NAME = re.compile(
    r"(^(api|access|auth|bearer|hub|hf|github|refresh|secret|user)?_?tokens"
    r"|token|secrets?|passwords?|passwd|passphrase|api[_\-. ]?keys?"
    r"|(^|[_\-. ])(key|pass|pwd|pat|cred(ential)?s?|auth|authorization|bearer|cookies?|webhook(_url)?))\d*"
    r"([_\-](read|write|ro|rw|admin|prod|production|dev|test|staging|old|new|primary|secondary|base64|pem|\d+))*$",
    re.IGNORECASE,
)
"""Ends of names of fields, variables and keys whose texts belong in no file of a run."""
NO_SECRETS = re.compile(
    r"(^|_)((bos|eos|pad|unk|sep|cls|mask|image|video|audio)_?token"
    r"|(image|video|audio|prompt|question|answer|response|label|text|data|reward_fn)_key"
    r"|(forward|backward|first|second|last|single)_pass)$|(?-i:^(OLD)?PWD$)",
    re.IGNORECASE,
)
"""Tokens of a vocabulary, names of columns, passes of a model, and the shell's current folder."""
NEVER_NUMBERS = re.compile(r"(secrets?|passwords?|passwd|passphrase|pwd|api_?keys?)$", re.IGNORECASE)
"""Names under which a number is a secret too: a `token` or a `key` may be an index."""
HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
USER_OF_URL = re.compile(
    r"\b([a-z][a-z0-9+.-]{0,20}://)([^\s/?#'\"<>]+|[^\s/?#'\"<>:\[]+:(?!\d+[/?#])[^\s'\"<>@]{1,300})@", re.IGNORECASE
)
"""A password may hold a slash; what follows a port is a path. The bounds keep a line of many addresses linear."""
QUERY = re.compile(r"([?&;]([\w.~-]+)=)([^\s&#'\"<>]+)")
SIGNATURES = ("sig", "signature", "x-amz-signature", "x-amz-credential", "x-goog-signature", "awsaccesskeyid")
BEARER = re.compile(
    r"\b(bearer\s+)[\w.~+/=-]{8,}|\b(authorization[\"']?\s*[:=]\s*[\"']?basic\s+|basic\s+(?=[\w+/-]{8,}==?(?![\w=])))[\w+/=-]+",
    re.IGNORECASE,
)
FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|local-[0-9a-f]{32,}|AIza[\w-]{30,}|hooks\.slack\.com/services/[\w/]+"
    r"|(?<!-)eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----((?!-----BEGIN ).)+?-----END [A-Z ]{0,40}PRIVATE KEY-----",
    re.DOTALL,
)
"""Tokens that are known by their first letters."""


def is_secret_name(name: object) -> bool:
    plain = HUMPS.sub("_", str(name)).rpartition(".")[2]
    return SECRET_NAME.search(plain) is not None and NO_SECRETS.search(plain) is None


def is_secret(name: object, value: object) -> bool:
    """Whether `value`, which stands under `name`, is a secret (or the place of one, None)."""
    if not is_secret_name(name):
        return False
    items = value if isinstance(value, (list, tuple)) and value else [value]
    if not all(isinstance(item, (int, float)) for item in items):
        return True
    never_a_number = NEVER_NUMBERS.search(HUMPS.sub("_", str(name))) is not None
    return never_a_number and any(type(item) is int for item in items)


def drop_secrets(value: Any) -> Any:
    """The mapping or list without its secrets, to any depth; inside texts HIDDEN takes their place."""
    if isinstance(value, Mapping):
        return {key: drop_secrets(item) for key, item in value.items() if not is_secret(key, item)}
    if isinstance(value, (list, tuple)):
        return [drop_secrets(item) for item in value]
    return hide(value) if isinstance(value, str) else value


def redact(argv: Sequence[str]) -> list[str]:
    """The command line with HIDDEN for the values of secret flags and settings (`trainer.api_key=…`), and for those in
    a value that is a mapping (`--config.training.model_init_kwargs '{"token": …}'`)."""
    return [
        "".join([*before, HIDDEN if secret else hide(_redact_yaml(value))]) for before, value, secret in _words(argv)
    ]


def hide(text: str) -> str:
    """`text` with HIDDEN for every secret in it that can be told from the rest."""
    if "://" in text:
        text = USER_OF_URL.sub(rf"\1{HIDDEN}@", text)
    if "=" in text:
        text = QUERY.sub(lambda m: m[1] + (HIDDEN if _is_secret_query(m[2]) else m[3]), text)
    text = FORMS.sub(HIDDEN, BEARER.sub(rf"\1\2{HIDDEN}", text))
    known = _known()
    return known.sub(HIDDEN, text) if known is not None else text


class HideSecrets(logging.Filter):
    """Of a log's handler: no line of it holds a secret, nor does a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(TypeError, ValueError):  # arguments that do not fit: logging itself says so
            record.msg, record.args = hide(record.getMessage()), None
        if record.exc_info:
            record.exc_text = hide(logging.Formatter().formatException(record.exc_info))
        return True


HIDE_SECRETS = HideSecrets()


def hide_secrets_in_logs() -> None:
    """After logging.basicConfig: what this process logs holds no secret."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(HIDE_SECRETS)


def hide_secrets_in_tracebacks() -> None:
    """From here on a traceback that nothing catches, in any thread, holds no secret."""

    def show(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        sys.stderr.write(hide("".join(traceback.format_exception(kind, error, trace))))
        sys.stderr.flush()

    def show_of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            show(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook, threading.excepthook = show, show_of_thread


def hide_secrets_in_output() -> None:
    """From here on what Python prints in this process holds no secret."""
    for stream in (sys.stdout, sys.stderr):
        setattr(stream, "write", functools.partial(_write, stream.write))  # noqa: B010


def _write(write: Callable[[str], int], text: str) -> int:
    write(hide(text))
    return len(text)


def _is_secret_query(name: str) -> bool:
    return is_secret_name(name) or name.lower() in SIGNATURES


def _words(argv: Sequence[str]) -> Iterator[tuple[list[str], str, bool]]:
    """Of each word: what stands before its value, the value, and whether its name says that it is a secret."""
    after_secret = False
    for word in argv:
        name, equals, value = word.partition("=")
        named = bool(equals) and re.fullmatch(r"[-+~]*[\w.-]+", name) is not None
        before = [name, equals] if named else []
        secret = after_secret or (named and is_secret_name(name.rpartition(".")[2].lstrip("-+~")))
        yield before, value if named else word, secret
        after_secret = word.startswith("--") and not equals and is_secret_name(word.rpartition(".")[2].lstrip("-"))


def _redact_yaml(text: str) -> str:
    """The text of a flag, redacted where it is a mapping, or a list of mappings, that holds secrets."""
    mapping = _mapping(text)
    if mapping is None:
        return text

    def hidden(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: HIDDEN if is_secret(key, item) else hidden(item) for key, item in value.items()}
        return [hidden(item) for item in value] if isinstance(value, list) else value

    shown = hidden(mapping)
    if shown == mapping:
        return text
    return json.dumps(shown, default=str, ensure_ascii=False)


def _mapping(text: str) -> Any:
    """What a text stands for in YAML, where that is a mapping or a list; else None."""
    if ":" not in text:
        return None
    try:
        import yaml
    except ImportError:
        return None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return content if isinstance(content, (dict, list)) else None


def _known() -> re.Pattern[str] | None:
    """The secrets that the environment, the command line and its --recipe know by their names, longest first."""
    of_environment = {value for name, value in os.environ.items() if is_secret_name(name)}
    argv = getattr(sys, "orig_argv", sys.argv)  # Python 3.9, which the doctor runs with, has no orig_argv
    return _pattern(frozenset(of_environment), tuple(argv))


@functools.lru_cache(maxsize=4)
def _pattern(values: frozenset[str], argv: tuple[str, ...]) -> re.Pattern[str] | None:
    flags = [value for _, value, secret in _words(argv) if secret]
    mappings = [*_recipes(argv), *(_mapping(value) for _, value, _ in _words(argv))]
    below = [value for mapping in mappings for value in _secrets_in(mapping)]
    wanted = {spelling for value in (*values, *flags, *below) for spelling in _spellings(value)}
    longest_first = sorted(wanted, key=lambda value: (-len(value), value))
    return re.compile("|".join(map(re.escape, longest_first))) if wanted else None


def _spellings(value: str) -> Iterator[str]:
    """How a secret stands in a text: as it is, each of its lines (a log is redacted line by line), and as JSON, repr
    and addresses write it."""
    if len(value) < LEAST_LENGTH:
        return
    yield from (line for line in map(str.strip, value.splitlines()) if len(line) >= LEAST_LENGTH)
    yield from (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    encoded = value.encode(errors="surrogateescape")
    yield from (quote(encoded, safe=""), quote(encoded), quote_plus(encoded))


def _recipes(argv: Sequence[str]) -> Iterator[Any]:
    """What stands in the YAML files that a command line names, and in those that they build on (perl.config.load); what
    is wrong with one is said where it is taken."""
    wanted = [
        word.partition("=")[2] or word
        for before, word in zip_longest(["", *argv], argv, fillvalue="")
        if before == "--recipe" or word.startswith("--recipe=") or word.endswith((".yaml", ".yml"))
    ]
    read: set[str] = set()
    while wanted:
        name = wanted.pop()
        file = next(filter(os.path.isfile, (name, os.path.join(REPOSITORY, name))), "")
        if not file or os.path.realpath(file) in read:
            continue
        read.add(os.path.realpath(file))
        with contextlib.suppress(OSError, ValueError), open(file, encoding="utf-8") as opened:
            yield (content := _mapping(opened.read()))
            if isinstance(content, dict) and isinstance(base := content.get("base"), str):
                wanted.append(os.path.join(os.path.dirname(os.path.realpath(file)), os.path.expanduser(base)))


def _secrets_in(value: Any) -> Iterator[str]:
    """Every text below `value` that stands under a secret name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not is_secret(key, item):
                yield from _secrets_in(item)
            elif item is not None:
                yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets_in(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    else:
        yield str(value)
