"""Variables and processes that decide which devices a run gets: visibility, allocator, Ray, leftovers."""

from __future__ import annotations

import re

from perl.tools.doctor.findings import Finding, failure, ok, warning
from perl.tools.doctor.machine import Machine


def visible_devices(machine: Machine) -> Finding | None:
    if machine.kind == "npu":
        return _ascend_visible(machine)
    if machine.kind == "cuda" and "CUDA_VISIBLE_DEVICES" in machine.env:
        value = machine.env["CUDA_VISIBLE_DEVICES"]
        ids = [part.strip() for part in value.split(",")]
        bad = [part for part in ids if part.isdigit() and int(part) >= len(machine.gpus)]
        if bad:
            why = f"there are {len(machine.gpus)} GPUs; CUDA hides the ids from the first wrong one on"
            keep = ",".join(str(i) for i in range(len(machine.gpus)))
            return failure(f"CUDA_VISIBLE_DEVICES={value}", why, f"export CUDA_VISIBLE_DEVICES={keep}")
        return ok(f"CUDA_VISIBLE_DEVICES={value}")
    return None


def _ascend_visible(machine: Machine) -> Finding | None:
    """CANN reads ids up to the first that is invalid or followed by another character, and says nothing."""
    count = len(machine.table.chips) or len(machine.npu_devices)
    everything = ",".join(str(i) for i in range(count))
    value = machine.env.get("ASCEND_RT_VISIBLE_DEVICES")
    if value is None:
        if "CUDA_VISIBLE_DEVICES" in machine.env:
            why = "it does not hide NPUs"
            fix = f"export ASCEND_RT_VISIBLE_DEVICES={machine.env['CUDA_VISIBLE_DEVICES']}; unset CUDA_VISIBLE_DEVICES"
            return warning(f"CUDA_VISIBLE_DEVICES={machine.env['CUDA_VISIBLE_DEVICES']} is set", why, fix)
        if "ASCEND_VISIBLE_DEVICES" in machine.env and "ASCEND_DOCKER_RUNTIME" not in machine.env:
            why = "only Ascend's Docker runtime reads it, when a container starts"
            fix = f"export ASCEND_RT_VISIBLE_DEVICES={machine.env['ASCEND_VISIBLE_DEVICES']}"
            return warning("ASCEND_VISIBLE_DEVICES is set, ASCEND_RT_VISIBLE_DEVICES is not", why, fix)
        return ok(f"all {count} (ASCEND_RT_VISIBLE_DEVICES is unset)") if count else None
    if not count:
        return None
    found = f"ASCEND_RT_VISIBLE_DEVICES={value}"
    read = ids_that_cann_reads(value, count)
    fix = f"export ASCEND_RT_VISIBLE_DEVICES={everything}"
    if not read:
        return failure(found, f"CANN reads no id of it (ids go from 0 to {count - 1}): no device is visible", fix)
    wanted = [int(part) for part in re.findall(r"\d+", value)]
    if read != wanted:
        lost = ",".join(str(i) for i in wanted[len(read) :])
        kept = ",".join(str(i) for i in sorted({i for i in wanted if i < count}))
        why = f"ids go from 0 to {count - 1}; CANN reads {','.join(map(str, read))} and drops {lost} without a word"
        return failure(found, why, f"export ASCEND_RT_VISIBLE_DEVICES={kept}")
    if read != sorted(set(read)):
        why = "CANN supports ascending ids only, each once"
        return failure(found, why, f"export ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, sorted(set(read))))}")
    return ok(f"{found}, {len(read)} of {count}")


def ids_that_cann_reads(value: str, count: int) -> list[int]:
    """The ids before the first one that is not a number below `count` written without spaces."""
    read = []
    for part in value.split(","):
        if not re.fullmatch(r"\d+", part):
            leading = re.match(r"\d+", part)  # "1 ,2": the digits before the foreign character count
            if leading and int(leading[0]) < count:
                read.append(int(leading[0]))
            break
        if int(part) >= count:
            break
        read.append(int(part))
    return read


def allocator(machine: Machine) -> Finding | None:
    """PYTORCH_NPU_ALLOC_CONF (or CUDA's): options that exclude each other, or vLLM's sleep mode."""
    if machine.kind == "cpu":
        return None
    names = {"npu": ("PYTORCH_NPU_ALLOC_CONF",), "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    name = next((n for n in names[machine.kind] if n in machine.env), "")
    if not name:
        return ok(f"{names[machine.kind][0]} is unset")
    value = machine.env[name]
    options = dict(part.split(":", 1) for part in value.replace(" ", "").split(",") if ":" in part)
    malformed = [part for part in value.split(",") if ":" not in part]
    if malformed:
        fix = f"export {name}=expandable_segments:True"
        return failure(f"{name}={value}", "each option is name:value; torch stops at its first allocation", fix)
    if options.get("expandable_segments", "").lower() == "true":
        clash = [o for o in ("max_split_size_mb", "garbage_collection_threshold") if o in options]
        if clash and machine.kind == "npu":
            why = f"expandable_segments excludes {' and '.join(clash)}"
            return failure(f"{name}={value}", why, f"export {name}=expandable_segments:True")
        why = "good for training; vLLM's sleep mode (TRL's vllm_mode colocate) refuses it"
        fix = f"export {name}=expandable_segments:False  # only where vLLM sleeps"
        if {"vllm", "vllm-ascend"} & set(machine.packages):
            return warning(f"{name}={value}", why, fix)
    return ok(f"{name}={value}")


def ray(machine: Machine) -> Finding | None:
    """A Ray cluster that was started by hand registers GPUs, and NPU tasks then wait for ever."""
    status = machine.output("ray status")
    running = [process for process in machine.processes if process.name in ("raylet", "gcs_server")]
    if not running and not status:
        return ok("not running, and not needed") if machine.kind == "npu" else None
    if machine.commands.get("ray status") is None:
        return warning("raylet runs, but `ray status` does not", "a leftover cluster holds devices", "ray stop --force")
    if machine.commands["ray status"].code:
        why = "its processes are left over and may hold devices"
        return warning("ray status fails: no cluster answers", why, "ray stop --force")
    amounts = {name: float(total) for total, name in re.findall(r"[\d.]+/([\d.]+) (NPU|GPU)\b", status)}
    demands = re.search(r"\{'NPU': [\d.]+[^}]*\}", status)
    if machine.kind != "npu":
        return ok(f"running with {amounts or 'no accelerators'}")
    if not amounts.get("NPU"):
        found = f"running with {amounts['GPU']:.0f} GPU and no NPU" if amounts.get("GPU") else "running without NPUs"
        waits = f"; {demands[0]} is pending" if demands else ""
        why = f"it was started by hand (--num-gpus), so tasks that ask for NPUs wait for ever{waits}"
        return failure(found, why, "ray stop --force  # then let the program start Ray itself")
    return ok(f"running with {amounts['NPU']:.0f} NPU")


def processes(machine: Machine) -> Finding | None:
    """Zombies and vanished processes that keep a device's memory."""
    by_pid = {process.pid: process for process in machine.processes}
    dead, gone = [], []
    for holder in machine.table.holders:
        # In a container npu-smi prints the host's ids, except in 26.0's own column.
        pid = holder.container_pid if machine.container else holder.pid
        if pid is None:
            continue
        if pid not in by_pid:
            if machine.root:  # other users' processes may be hidden from anybody else
                gone.append(holder)
        elif by_pid[pid].state == "Z":
            dead.append((holder, by_pid[pid]))
    if dead:
        found = ", ".join(f"zombie {p.name} (pid {p.pid}) holds NPU {h.npu}: {h.memory_mb} MB" for h, p in dead)
        parents = " ".join(sorted({str(p.parent) for _, p in dead}))
        fix = "docker restart …  # this container, from the host" if parents == "1" else f"kill -9 {parents}"
        return failure(found, "its parent does not collect it, so the memory stays taken", fix)
    if gone:
        found = ", ".join(f"NPU {h.npu} is held by pid {h.pid} ({h.name}), which does not exist" for h in gone)
        why = "the driver has not released it; the memory stays taken"
        return failure(found, why, f"npu-smi set -t reset -i {gone[0].npu} -c {gone[0].chip}  # resets that device")
    zombies = [p for p in machine.processes if p.state == "Z"]
    if len(zombies) >= 5:
        parents = " ".join(sorted({str(p.parent) for p in zombies}))
        why = "PID 1 of the container does not collect them; the process table fills up"
        fix = "docker run --init …" if parents == "1" else f"kill -9 {parents}"
        return warning(f"{len(zombies)} zombies ({', '.join(sorted({p.name for p in zombies}))})", why, fix)
    return ok(f"{len(zombies)} zombies, none holds a device") if machine.kind == "npu" else None
