"""Installed packages: do they go together, do their libraries load, does torch see what npu-smi sees?"""

from __future__ import annotations

from perl.tools.doctor.checks.ascend import NNAL_ENV, cann_home
from perl.tools.doctor.findings import Finding, failure, ok, warning
from perl.tools.doctor.machine import Machine
from perl.tools.doctor.versions import SET, conflicts, satisfies, unlisted

TRAINING = ("torch", "transformers", "trl", "peft", "accelerate")
TRAINING_BOUNDS = {"transformers": ">=5.5.4,<6", "trl": "==1.16.0", "peft": ">=0.21.2,<0.22", "accelerate": ">=1.15,<2"}
"""pyproject.toml's bounds; a test compares the two."""
TESTED = "the set that goes together is in docs/ascend.md"
SHOWN = (*TRAINING, "torch-npu", "vllm", "vllm-ascend", "triton-ascend", "numpy")


def versions(machine: Machine) -> Finding | None:
    packages = machine.packages
    if machine.kind == "npu":
        return _npu_versions(machine)
    absent = [name for name in TRAINING if name not in packages]
    if absent:
        why = "training needs them" if machine.kind == "cuda" else "nothing can run without them"
        return failure(f"{', '.join(absent)} not installed in {machine.prefix}", why, "make quickstart")
    wrong = _out_of_bounds(packages) + conflicts(packages)
    if wrong:
        return failure("; ".join(wrong), "perl is written against these versions", "pip install -e .")
    return ok(_list(packages))


def _npu_versions(machine: Machine) -> Finding:
    packages = machine.packages
    if not any(name in packages for name in ("torch", "torch-npu")):
        return failure(f"neither torch nor torch-npu in {machine.prefix}", "nothing is installed yet", SET.install)
    problems = conflicts(packages) + _absences(packages) + _out_of_bounds(packages)
    if machine.arch == "x86_64" and "+cpu" not in packages.get("torch", "+cpu"):
        problems.append(f"torch {packages['torch']} is a CUDA build; torch-npu on x86_64 wants {packages['torch']}+cpu")
    if "triton" in packages and "triton-ascend" in packages:
        problems.append(
            "triton overwrites triton-ascend's files: pip uninstall triton, then install triton-ascend again"
        )
    changes = SET.changes(packages)
    tested = f"{TESTED} ({', '.join(changes)})" if changes else TESTED
    if problems:
        return failure("; ".join(problems), tested, SET.install)
    if strange := unlisted(packages):
        return warning(f"{', '.join(strange)} is not in the doctor's table", tested, SET.install)
    return ok(_list(packages))


def _absences(packages: dict[str, str]) -> list[str]:
    needed = ["torch", "torch-npu", "transformers", "trl", "peft"]
    needed += ["vllm", "vllm-ascend"] if {"vllm", "vllm-ascend"} & set(packages) else []
    return [f"{name} is missing" for name in needed if name not in packages]


def _out_of_bounds(packages: dict[str, str]) -> list[str]:
    return [
        f"perl wants {name}{spec}, found {packages[name]}"
        for name, spec in TRAINING_BOUNDS.items()
        if name in packages and not satisfies(packages[name], spec)
    ]


def _list(packages: dict[str, str]) -> str:
    return ", ".join(f"{name} {packages[name]}" for name in SHOWN if name in packages)


def libraries(machine: Machine) -> Finding | None:
    """Shared objects that the loader cannot find, by name, before an import fails on the first of them."""
    missing = {package: names for package, names in machine.missing_libraries.items() if names}
    if not missing:
        looked = list(machine.missing_libraries)
        return ok(f"{', '.join(looked)}: all found") if looked else None
    names = sorted({name for names in missing.values() for name in names})
    found = "; ".join(f"{package} lacks {', '.join(names)}" for package, names in missing.items())
    if names == ["libascend_hal.so"]:
        lib64 = "/usr/local/Ascend/driver/lib64"
        fix = f"export LD_LIBRARY_PATH={lib64}/driver:{lib64}/common:$LD_LIBRARY_PATH"
        return failure(found, "it belongs to the driver", fix)
    if names == ["libatb.so"]:
        return failure(found, "it belongs to NNAL", f"source {NNAL_ENV}")
    home = cann_home(machine)
    if home:
        return failure(found, "CANN is installed, but the loader does not look there", f"source {home}/set_env.sh")
    if machine.kind != "npu":
        why = "there is neither CANN nor an NPU here, and an installed torch_npu makes `import torch` itself fail"
        return failure(
            found, why, "pip uninstall -y torch-npu  # to use the CPU; or export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
    return failure(
        found,
        "they belong to CANN, which is not installed",
        "bash scripts/check_npu_env.sh  # the check cann names the package",
    )


def torch(machine: Machine) -> Finding | None:
    seen = machine.torch
    if not seen:
        return None
    if "timeout" in seen:
        why = "a device or a network file system does not answer"
        return warning(f"import torch did not end in {seen['timeout']} s", why, "time python -c 'import torch'")
    if seen.get("error"):
        error = str(seen["error"])[:200]
        if any(machine.missing_libraries.values()):
            return failure(
                f"import fails: {error}",
                "libraries are missing",
                "bash scripts/check_npu_env.sh  # fix libraries first",
            )
        return failure(
            f"import fails: {error}", "nothing can run", "python -X importtime -c 'import torch' 2>&1 | tail"
        )
    version, npu, cuda = seen.get("version", "?"), seen.get("npu", 0), seen.get("cuda", 0)
    if machine.kind == "cuda":
        if cuda:
            return ok(f"torch {version} sees {cuda} GPU(s)")
        why = f"{len(machine.gpus)} GPU(s) stay unused: this build of torch has no CUDA, or an older driver is loaded"
        return failure(f"torch {version} sees no GPU", why, "pip install torch --force-reinstall; nvidia-smi")
    if machine.kind == "cpu":
        return ok(f"torch {version} on {seen.get('threads', '?')} thread(s)")
    if "torch-npu" not in machine.packages:
        return None  # the check versions says so
    chips = len(machine.table.chips) or len(machine.npu_devices)
    if not npu:
        why = "training would run on the CPU"
        fix = "python -c 'import torch, torch_npu; torch.npu.set_device(0)'"
        return failure(f"torch {version} sees no NPU of {chips}", why, fix)
    if npu < chips and not machine.env.get("ASCEND_RT_VISIBLE_DEVICES"):
        return warning(f"torch {version} sees {npu} of {chips} NPUs", "the others stay unused", "npu-smi info")
    return ok(f"torch {version} sees {npu} NPU(s)")
