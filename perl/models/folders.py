"""Model folders on disk: how one is found and loaded, where its tensors lie, what its content hashes to, how a new one
is written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from perl.base.errors import UserError
from perl.base.files import is_of_process, typed
from perl.base.paths import user_path
from perl.models import few_bits
from perl.models.adapter_files import leads_out, require_contained

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".safetensors.index.json",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "*.model",
    "*.model.v*",
    "vocab*",
    "*.tiktoken",
    "tekken.json",
    "tokenization_*.py",
)
"""One of which holds a tokenizer's words."""
PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth")
RENAMED = (("model.language_model.", "model."), ("model.visual.", "visual."))
"""How transformers' names of weights begin where the files of Qwen2.5-VL begin otherwise."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MODELSCOPE_VARIABLES = ("PERL_USE_MODELSCOPE", "VERL_USE_MODELSCOPE")
"""Either says, as 1, true or yes, that names of models and data sets are ModelScope's."""
MOST = {r"(layers?|depth|blocks|dense|hash)$": 1_000, r"num_labels$": 1_000_000, r"": 2**63 - 1}
"""Pattern of a field's name in config.json -> the largest number there; the first pattern found counts. transformers
makes a list of as many entries of the first two before it checks anything."""


def modelscope_variable() -> str | None:
    """The one of MODELSCOPE_VARIABLES that is set, or None: names are the Hugging Face Hub's."""
    return next((n for n in MODELSCOPE_VARIABLES if os.environ.get(n, "").lower() in ("1", "true", "yes")), None)


def resolve_model(model: str, flag: str = "--model") -> Path:
    """The local folder of `model`, a path or a hub name; a hub name is downloaded unless it is in the cache."""
    folder = user_path(model)
    if os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        if not (folder / "config.json").is_file():
            adapter = "--adapter" if flag == "--model" else "--config.peft.adapter"
            hint = f"; it holds an adapter, write it after {adapter}" if (folder / ADAPTER_CONFIG).is_file() else ""
            raise UserError(f"{flag} {model}: no config.json in this folder{hint}")
        require_plain_data(folder, f"{flag} {model}")
        return folder
    folder = from_hub(model, flag)
    require_plain_data(folder, f"{flag} {model}")
    return folder


class WeightIndex(TypedDict):
    """What is read of INDEX."""

    weight_map: dict[str, str]
    """Tensor -> file."""


def require_plain_data(folder: Path, where: str) -> None:
    """Refuse a model's folder whose weights are pickles, lie outside of it, or come with an adapter that transformers
    would put on them without a word."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{where}: holds a model and an adapter ({ADAPTER_CONFIG}) in one folder; put them into two")
    if (folder / INDEX).is_file():
        _weight_files(folder, where)
    if any(folder.glob("*.safetensors")):
        return
    if pickled := next((file.name for name in PICKLED for file in sorted(folder.glob(name))), None):
        raise UserError(
            f"{where}: its weights are pickled ({pickled}), which is not loaded; load it with transformers where you"
            " trust it, and write it with save_pretrained, as safetensors"
        )


def _weight_files(folder: Path, where: str) -> list[str]:
    """The files that the index names, each in the folder itself. A UserError for an index that names none, or one
    elsewhere."""
    try:
        index = typed(json.loads((folder / INDEX).read_text(encoding="utf-8")), WeightIndex)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {INDEX} names no weights ({error}); copy the model again") from error
    files = sorted(set(index["weight_map"].values()))
    elsewhere = [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]
    if elsewhere:
        raise UserError(f"{where}: {INDEX} names {elsewhere[0]!r}, which is no safetensors file in this folder")
    return files


MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.py")


def from_hub(model: str, flag: str, files: Sequence[str] = MODEL_FILES) -> Path:
    """The folder in the hub's cache with these files of `model`, fetched where they are not there."""
    if model.count("/") != 1 or model.startswith((".", "~", "/")) or os.path.exists(user_path(model)):
        raise UserError(
            f"{flag} {model}: no such folder; write the folder of a model, or a hub name such as Qwen/Qwen2.5-7B"
        )
    variable = modelscope_variable()
    try:
        if variable:
            from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]
        else:
            from huggingface_hub import snapshot_download
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except ImportError as error:
        raise UserError(
            f"{flag} {model}: {variable} is set, but modelscope is not installed; pip install modelscope"
        ) from error
    except Exception as error:  # the hubs have a class of error for each of a dozen causes
        raise UserError(
            f"{flag} {model}: no such folder, and the hub gave nothing ({type(error).__name__});"
            " write the path of a model's folder"
        ) from error


def load_config(folder: str | Path, flag: str = "--model") -> Any:
    """The PretrainedConfig of the model in `folder`. Whoever names the folder gives its `flag` for the message of a
    UserError, here and in `load_tokenizer` and `load_model`."""
    return _load("AutoConfig", folder, flag)


def load_tokenizer(folder: str | Path, flag: str = "--model", **options: Any) -> Any:
    """The tokenizer in `folder`; options are transformers'."""
    return _load("AutoTokenizer", folder, flag, **options)


VISION_MODELS = ("qwen2_5_vl",)
"""transformers' model types of the models that are given images."""


def takes_images(config: Any) -> bool:
    """Whether a model of this PretrainedConfig is given images."""
    return config.model_type in VISION_MODELS


def load_model(
    folder: str | Path, flag: str = "--model", *, quantization: few_bits.BaseQuantisation = "none", **options: Any
) -> Any:
    """The causal language model in `folder`, with its vision tower if it has one, on the CPU unless `options`
    (transformers') say otherwise.

    Args:
        quantization: nf4: its layers are quantised as they load, on the device of this process; needs the option dtype.
    """
    if quantization == "nf4":
        options |= few_bits.options(options["dtype"])
    model = _load(_loader(load_config(folder, flag)), folder, flag, **options)
    few_bits.keep_packing(model)
    return model


def kind_of(config: Any) -> Any:
    """The class of transformers that `load_model` loads a model of this PretrainedConfig with."""
    import transformers

    return getattr(transformers, _loader(config))


def _loader(config: Any) -> str:
    return "AutoModelForImageTextToText" if takes_images(config) else "AutoModelForCausalLM"


def _load(loader: str, folder: str | Path, flag: str, **options: Any) -> Any:
    import transformers
    from transformers.utils import logging as transformers_logging

    where, is_model = f"{flag} {folder}", loader.startswith("AutoModel")
    if Path(folder).is_dir():
        if not (Path(folder) / "config.json").is_file():
            raise UserError(f"{where}: no config.json in this folder; name the folder that holds a whole model")
        _require_fields(Path(folder) / "config.json", where)
        if loader == "AutoTokenizer":
            _require_tokenizer_files(Path(folder), where)
    transformers_logging.disable_progress_bar()
    options.setdefault("trust_remote_code", False)  # without a word of it transformers would ask on the terminal
    if is_model:
        options.setdefault("use_safetensors", True)
        options["output_loading_info"] = True
        require_whole_weights(Path(folder), where)
    try:
        loaded = getattr(transformers, loader).from_pretrained(folder, **options)
    except Exception as error:
        reason = _why_not_loaded(error) if is_model else reason_of(error)
        if reason is None:
            raise
        raise UserError(f"{where}: cannot be loaded as a causal language model: {reason}") from error
    if not is_model:
        return loaded
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"{where}: its files hold no {missing[0]} ({len(missing)} weights are missing), which transformers"
            " would make up; copy the whole model again"
        )
    return model


def reason_of(error: Exception) -> str:
    """What transformers could not read a file for, in one line."""
    if "trust_remote_code" in str(error):
        return "it brings Python code of its own (auto_map), which is not run"
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join([first, *map(str.strip, others[: first.endswith(":")])])  # a field's name, then what it is about


def _why_not_loaded(error: Exception) -> str | None:
    """What a model could not be loaded for, in one line; None where that is no fault of its files."""
    if isinstance(error, RuntimeError) and "mismatched_sizes" in str(error):
        return "the shapes of its weights are not those that config.json says"
    plain = (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError)
    return reason_of(error) if isinstance(error, plain) else None


def require_whole_weights(folder: Path, where: str) -> None:
    """Raise a UserError for a safetensors file in `folder` that is cut off or none at all, as a copy that broke off
    leaves it. Headers alone are read."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{where}: {file.name} is cut off or no safetensors file ({error}); copy it again"
            ) from error


def _require_fields(file: Path, where: str) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {file.name} is not readable ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{where}: {file.name} holds no fields; copy it again")
    require_sizes(content, f"{where}: {file.name}")


def require_sizes(fields: Mapping[str, Any], where: str) -> None:
    """A UserError, which begins with `where`, for a size in what a config.json holds that no model has."""
    waiting = [fields]
    while waiting:
        for name, value in waiting.pop().items():
            most = next(most for pattern, most in MOST.items() if re.search(pattern, name))
            if isinstance(value, dict):
                waiting.append(value)
            elif isinstance(value, int) and value > most:
                raise UserError(f"{where}: {name} is over {most}, as in no model; copy it again")


def _require_tokenizer_files(folder: Path, where: str) -> None:
    """transformers makes an empty tokenizer where there is no file of one."""
    if not any(next(folder.glob(name), None) for name in TOKENIZER_FILES):
        raise UserError(f"{where}: holds no tokenizer (tokenizer.json or the like); copy the model's into the folder")


def eos_token_ids(folder: str | Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a completion: those of generation_config.json, or of `config` where there is no such file,
    and the tokenizer's."""
    from transformers import GenerationConfig

    if (Path(folder) / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder)
    else:
        generation = GenerationConfig.from_model_config(config)
    return frozenset(token_ids(generation.eos_token_id) + token_ids(tokenizer.eos_token_id))


def token_ids(named: int | Sequence[int] | None) -> list[int]:
    """What a configuration's eos_token_id stands for: one token, several, or none."""
    return [named] if isinstance(named, int) else list(named or ())


def require_adapter(adapter: Path, flag: str = "--adapter") -> dict:
    """The adapter's configuration (adapter_config.json), or a UserError when the folder holds no PEFT adapter."""
    if not os.path.isdir(adapter):
        raise UserError(f"{flag} {adapter}: no such folder; write the folder that holds {ADAPTER_CONFIG}")
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            below = next((p.parent for p in sorted(adapter.glob(f"*/{name}"))), None)
            raise UserError(
                f"{flag} {adapter}: no {name} in this folder" + (f"; did you mean {below}?" if below else "")
            )
    if link := next((p for p in sorted(adapter.iterdir()) if leads_out(p, adapter)), None):
        raise UserError(f"{flag} {link}: is a link out of the adapter's folder; put the file there in its place")
    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{flag} {adapter / ADAPTER_CONFIG}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{flag} {adapter / ADAPTER_CONFIG}: holds no fields; write the folder of a PEFT adapter")
    require_contained(config, f"{flag} {adapter / ADAPTER_CONFIG}")
    return config


class Checkpoint:
    """The safetensors files of one model folder, opened lazily: a tensor is read when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shards: dict[str, list[str]] = _shards(folder)
        """File name -> names of the tensors in it."""
        self.location = {tensor: file for file, tensors in self.shards.items() for tensor in tensors}

    def __contains__(self, name: str) -> bool:
        return self.stored(name) in self.location

    def stored(self, name: str) -> str:
        """What the files call the weight that transformers calls `name` in the model."""
        if name in self.location:
            return name
        renamed = (stored + name.removeprefix(loaded) for loaded, stored in RENAMED if name.startswith(loaded))
        return next((other for other in renamed if other in self.location), name)

    def read(self, name: str) -> torch.Tensor:
        """The weight of this name, the files' or the model's."""
        name = self.stored(name)
        from safetensors import safe_open

        with safe_open(self.folder / self.location[name], framework="pt") as file:
            return file.get_tensor(name)

    def dtype(self) -> torch.dtype:
        """The floating dtype in which most of the numbers are stored."""
        import torch
        from safetensors import safe_open

        known = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        sizes: Counter[torch.dtype] = Counter()
        for shard, names in self.shards.items():
            with safe_open(self.folder / shard, framework="pt") as file:
                for name in names:
                    stored = file.get_slice(name)
                    if stored.get_dtype() in known:
                        sizes[known[stored.get_dtype()]] += math.prod(stored.get_shape())
        if not sizes:
            raise UserError(f"{self.folder}: holds no floating-point weights; write the model before quantization")
        return sizes.most_common(1)[0][0]


def _shards(folder: Path) -> dict[str, list[str]]:
    from safetensors import safe_open

    require_whole_weights(folder, str(folder))
    files = _weight_files(folder, str(folder)) if (folder / INDEX).is_file() else ["model.safetensors"]
    shards = {}
    for name in files:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name}; the model's weights must lie there as safetensors")
        with safe_open(folder / name, framework="pt") as file:
            shards[name] = list(file.keys())
    return shards


def content_hash(folder: Path) -> str:
    """BLAKE2b over the weights and configuration of a model's or adapter's folder: 32 hexadecimal digits.

    Names of the files count, paths and times do not, so a copy has the same hash. Files are hashed in parallel
    (about 1 GB/s a core).
    """
    wanted = ("config.json", "generation_config.json", ADAPTER_CONFIG)
    files = sorted(p for p in folder.iterdir() if p.is_file() and (p.suffix == ".safetensors" or p.name in wanted))

    def one(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    total = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(4) as pool:
        for path, digest in zip(files, pool.map(one, files), strict=True):
            total.update(f"{path.name}\x1f{digest}\x1e".encode())
    return total.hexdigest()


def copy_side_files(source: Path, target: Path) -> None:
    """Copy all but the weights, byte for byte: transformers 5 would rewrite configuration and tokenizer in a form
    that 4.57 misreads. A link out of the folder is left out with a line: what it leads to belongs to no model."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_file() and not any(map(is_of_process, relative.parts)) and not path.name.endswith(WEIGHT_SUFFIXES):
            if leads_out(path, source):
                logger.warning("%s is a link out of the model's folder, to %s: not copied", path, path.resolve())
                continue
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / relative)


@contextlib.contextmanager
def written_whole(output: Path) -> Iterator[Path]:
    """A temporary folder next to `output` that takes its place when the body ends well and vanishes when it does not.

    `output` must be absent, empty, or an earlier merge of ours. Where it is a link, what it leads to is replaced.
    """
    output = output.resolve()
    if output == Path.cwd():
        raise UserError(f"--output {output}: is the current folder, which would be replaced; write a new folder in it")
    if output.exists() and not (output / "merge.json").is_file() and (output.is_file() or any(output.iterdir())):
        raise UserError(f"--output {output}: exists and is not a merged model; write a new folder")
    temporary = output.with_name(f"_{output.name}.{os.getpid()}.partial")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}; write another folder") from error
    try:
        yield temporary
        if output.exists():
            shutil.rmtree(output)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
