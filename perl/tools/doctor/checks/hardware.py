"""Machine, Python, accelerator, disk and shared memory: what every kind of machine has."""

from __future__ import annotations

from perl.tools.doctor.findings import Finding, failure, ok, warning
from perl.tools.doctor.machine import Machine
from perl.tools.doctor.versions import SET, satisfies

FULL_DISK_GB, SMALL_DISK_GB = 5, 50
"""A 7B checkpoint is 15 GB in bf16; the merged model is as large again."""
SMALL_SHM_GB = 1


def architecture(machine: Machine) -> Finding | None:
    if machine.arch in ("aarch64", "arm64"):
        return ok(machine.arch)
    if machine.arch in ("x86_64", "AMD64"):
        note = "; torch for torch-npu comes from PyTorch's CPU index here" if machine.kind == "npu" else ""
        return ok(machine.arch + note)
    return failure(
        machine.arch,
        "torch and torch-npu are published for aarch64 and x86_64 only",
        "uname -m  # use an aarch64 or x86_64 machine",
    )


def python(machine: Machine) -> Finding | None:
    found = f"{machine.python} in {machine.prefix or '?'}"
    if not satisfies(machine.python, ">=3.11"):
        fix = SET.install if machine.kind == "npu" else "uv venv --python 3.11 && source .venv/bin/activate"
        return failure(found, "perl needs Python 3.11 or newer", fix)
    if machine.kind == "npu" and not satisfies(machine.python, SET.python):
        return warning(found, "requirements_vllm_npu.txt is resolved for Python 3.11 and 3.12", SET.install)
    return ok(found)


def accelerator(machine: Machine) -> Finding | None:
    if machine.kind == "cpu":
        return ok("none: the quickstart, the tests and tiny models run on the CPU; a 7B model needs an NPU or a GPU")
    if machine.kind == "cuda":
        return ok(", ".join(machine.gpus))
    chips = machine.table.chips
    if chips:
        names = sorted({chip.name for chip in chips})
        memory = sorted({chip.memory_total_mb // 1024 for chip in chips})
        return ok(f"{len(chips)} x {'/'.join(names)}, {'/'.join(map(str, memory))} GB each")
    where = f"; {machine.pci_accelerators} on the PCI bus" if machine.pci_accelerators else ""
    if machine.npu_devices:
        return warning(
            f"{len(machine.npu_devices)} device files, but npu-smi lists no NPU{where}",
            "their state and memory cannot be checked",
            "npu-smi info",
        )
    return failure(
        f"Ascend software is here, but no NPU can be seen{where}",
        "nothing can be computed on an NPU",
        DOCKER_RUN if machine.container else "lspci | grep -i 'accelerator.*Huawei'; npu-smi info",
    )


DOCKER_RUN = (
    "docker run --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc"
    " -v /usr/local/dcmi:/usr/local/dcmi -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi"
    " -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /etc/ascend_install.info:/etc/ascend_install.info:ro"
    " --shm-size 16g …  # one --device /dev/davinciN for each NPU"
)


def disk(machine: Machine) -> Finding | None:
    if not machine.free_gb:
        return None
    found = ", ".join(f"{what} {gb:.0f} GB free" for what, gb in machine.free_gb.items())
    least, gb = min(machine.free_gb.items(), key=lambda item: item[1])
    fix = {
        "outputs": "du -sh outputs/*  # or write elsewhere: --config.training.output_dir /path/with/space",
        "models": "export HF_HOME=/path/with/space",
        "tmp": "export TMPDIR=/path/with/space",
    }.get(least, "df -h")
    if gb < FULL_DISK_GB:
        return failure(found, "a checkpoint cannot be written in full", fix)
    if gb < SMALL_DISK_GB and machine.kind != "cpu":
        return warning(found, "a 7B model takes 15 GB, its merged copy as much again", fix)
    return ok(found)


def shm(machine: Machine) -> Finding | None:
    if machine.shm_gb is None:
        return None
    found = (
        f"{machine.shm_gb:.0f} GB in /dev/shm" if machine.shm_gb >= 1 else f"{machine.shm_gb * 1024:.0f} MB in /dev/shm"
    )
    if machine.shm_gb >= SMALL_SHM_GB:
        return ok(found)
    fix = "docker run --shm-size 16g …" if machine.container else "mount -o remount,size=16G /dev/shm"
    return warning(found, "vLLM's workers and data loaders share tensors there; a full one ends in a bus error", fix)
