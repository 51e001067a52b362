"""Driver, devices and CANN: what Ascend's software needs before Python comes in."""

from __future__ import annotations

import os
import re

from perl.tools.doctor import smi
from perl.tools.doctor.checks.hardware import DOCKER_RUN
from perl.tools.doctor.findings import Finding, failure, ok, warning
from perl.tools.doctor.machine import Machine
from perl.tools.doctor.versions import SET, TABLE, compare, series

MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
DRIVER_INFO = "/usr/local/Ascend/driver/version.info"
FIRMWARE_INFO = "/usr/local/Ascend/firmware/version.info"
REINSTALL_DRIVER = (
    "bash Ascend-hdk-*-npu-driver_*.run --upgrade && bash Ascend-hdk-*-npu-firmware_*.run --full && reboot"
)
BUSY_PERCENT = 20
"""An idle 910B reports 3 to 3.5 GB of 64 in use."""


def npu_smi(machine: Machine) -> Finding | None:
    command = machine.commands.get("npu-smi info")
    if command is None:
        hidden = next((p for p in ("/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi") if p in machine.files), "")
        if hidden:
            why = "the device checks below see nothing"
            return warning(f"not in PATH, but at {hidden}", why, f"export PATH={os.path.dirname(hidden)}:$PATH")
        if machine.container:
            fix = "docker run -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi -v /usr/local/dcmi:/usr/local/dcmi …"
            return warning("not in this container", "the device checks below see nothing", fix)
        return failure("not installed", "it comes with the driver, which is missing then", REINSTALL_DRIVER)
    if command.code == 124:
        why = "the driver does not answer: a device hangs or is being reset"
        return failure("npu-smi info did not end in time", why, "dmesg | grep -i -E 'davinci|devdrv' | tail; reboot")
    if machine.table.chips:
        return ok(f"{machine.table.version or '?'}, {len(machine.table.chips)} devices")
    code = smi.dcmi_error(command.output)
    if code == "-8020":
        why = "another container holds the device, or this one lacks the driver's files"
        return failure(f"ret is {code} (device is used)", why, DOCKER_RUN)
    if code == "-8005":
        if not machine.root:
            why = "this user may not open the device files"
            return failure(f"ret is {code}", why, "sudo usermod -aG HwHiAiUser $USER && newgrp HwHiAiUser")
        why = "the driver is not loaded, differs from the firmware, waits for a reboot, or the device is another's"
        return failure(
            f"ret is {code}", why, "lsmod | grep drv_; cat /var/log/ascend_seclog/ascend_install.log; reboot"
        )
    last = command.output.strip().splitlines()[-1:] or ["nothing"]
    return failure(f"exit {command.code}, printed: {last[0][:120]}", "no device can be listed", "npu-smi info")


def driver(machine: Machine) -> Finding | None:
    version = driver_version(machine)
    if not version:
        if not machine.npu_devices and not machine.table.chips:
            fix = DOCKER_RUN if machine.container else REINSTALL_DRIVER
            return failure(f"no driver ({DRIVER_INFO} is missing)", "torch_npu cannot reach a device", fix)
        fix = "docker run -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro …"
        return warning(
            f"version unknown ({DRIVER_INFO} is missing)", "CANN reads it, and loads libascend_hal.so there", fix
        )
    toolkit = cann_version(machine)
    least = TABLE["driver"].get(series(toolkit), "") if toolkit else ""
    if least and compare(version, least) < 0:
        return failure(version, f"CANN {toolkit} needs driver {least} or newer", REINSTALL_DRIVER)
    return ok(f"{version}" + (f" (CANN {toolkit} needs {least})" if least else ""))


def firmware(machine: Machine) -> Finding | None:
    if not driver_version(machine):
        return None
    version = _field(machine.files.get(FIRMWARE_INFO, ""), "Version")
    if not version:
        return ok("not visible in this container") if machine.container else ok("version not recorded")
    allowed = re.search(r"compatible_version_fw=\[([\d.]+),([\d.]+)\]", machine.files.get(DRIVER_INFO, ""))
    if allowed and not compare(allowed[1], version) <= 0 <= compare(allowed[2], version):
        why = f"driver {driver_version(machine)} takes firmware {allowed[1]} to {allowed[2]}"
        return failure(version, why, "bash Ascend-hdk-*-npu-firmware_*.run --full && reboot")
    return ok(version)


def device_files(machine: Machine) -> Finding | None:
    devices = machine.npu_devices
    if not devices:
        if machine.container:
            why = "the container was started without its NPUs"
            on_host = f" ({machine.pci_accelerators} on the host)" if machine.pci_accelerators else ""
            return failure(f"no /dev/davinci* in this container{on_host}", why, DOCKER_RUN)
        why = "the driver is not loaded, or there is no NPU in this machine"
        return failure("no /dev/davinci*", why, "lspci | grep -i 'accelerator.*Huawei'; lsmod | grep drv_")
    missing = [path for path in MANAGERS if path not in machine.devices]
    if missing:
        flags = " ".join(f"--device {path}" for path in missing)
        why = "a device cannot be opened without them"
        return failure(f"{', '.join(missing)} missing", why, f"docker run {flags} …")
    closed = [path for path, device in machine.devices.items() if not device.usable]
    if closed:
        device = machine.devices[closed[0]]
        found = f"{', '.join(closed)} not readable and writable ({device.mode} {device.owner})"
        group = device.owner.split(":")[-1]
        return failure(found, "this user cannot open the devices", f"sudo usermod -aG {group} $USER && newgrp {group}")
    listed = len(machine.table.chips)
    if listed and listed != len(devices):
        found = f"{len(devices)} device files, but npu-smi info lists {listed} chips"
        why = (
            "only the devices with a file can be used" if listed > len(devices) else "a device has dropped off the bus"
        )
        return warning(found, why, DOCKER_RUN if machine.container else "dmesg | grep -i davinci | tail; reboot")
    return ok(f"{devices[0]} … {os.path.basename(devices[-1])}, {len(devices)} in all")


def health(machine: Machine) -> Finding | None:
    chips = machine.table.chips
    if not chips:
        return None
    sick = [chip for chip in chips if chip.health != "OK"]
    if not sick:
        return ok(f"{len(chips)} of {len(chips)} OK")
    found = ", ".join(f"device {chip.index} (NPU {chip.npu}) {chip.health}" for chip in sick)
    first = sick[0]
    query = f"npu-smi info -t health -i {first.npu} -c {first.chip}"
    if all(chip.health == "Warning" for chip in sick):
        return warning(found, "it works, but has reported an event (often temperature or a corrected error)", query)
    good = ",".join(str(chip.index) for chip in chips if chip.health == "OK")
    why = "a run on it fails or hangs"
    return failure(found, why, f"export ASCEND_RT_VISIBLE_DEVICES={good}  # and look: {query}" if good else query)


def device_memory(machine: Machine) -> Finding | None:
    chips = machine.table.chips
    if not chips:
        return None
    percents = {chip.index: 100 * chip.memory_used_mb // max(1, chip.memory_total_mb) for chip in chips}
    busy = {index: percent for index, percent in percents.items() if percent > BUSY_PERCENT}
    if not busy:
        return ok(f"{max(percents.values())} % in use at most")
    found = ", ".join(f"device {index} {percent} %" for index, percent in busy.items()) + " in use"
    holders = {
        chip.index: [h for h in machine.table.holders if (h.npu, h.chip) == (chip.npu, chip.chip)] for chip in chips
    }
    names = sorted({f"{h.name} (pid {h.pid})" for index in busy for h in holders[index]})
    free = ",".join(str(index) for index in percents if index not in busy)
    why = f"held by {', '.join(names)}: a run there runs out of memory" if names else "held by a process not shown here"
    return warning(
        found,
        why,
        f"export ASCEND_RT_VISIBLE_DEVICES={free}" if free else "npu-smi info  # then kill the process, or wait for it",
    )


def cann(machine: Machine) -> Finding | None:
    version = cann_version(machine)
    if not version:
        wanted = TABLE["cann"]["torch-npu"].get(machine.packages.get("torch-npu", ""), "9.1")
        why = "torch_npu loads its libraries (libhccl.so, libascendcl.so)"
        image = f"quay.io/ascend/cann:{wanted}.*"
        fix = f"{_toolkit_installer(machine, wanted)}  # then its ops package; or start from the image {image}"
        return failure("no CANN toolkit found", why, fix)
    for package in ("vllm-ascend", "torch-npu"):  # the stricter one first
        table = TABLE["cann"][package]
        installed = machine.packages.get(package, "").split("+")[0]
        wanted = table.get(installed)
        if not wanted or series(version) in (wanted, series(SET.cann)):
            continue  # in the set's CANN it is the packages that are wrong
        why = f"{package} {installed} goes with CANN {wanted}"
        other = next((home for home in cann_homes(machine) if series(_version_in(machine, home)) == wanted), "")
        fix = f"source {other}/set_env.sh  # in a new shell" if other else _toolkit_installer(machine, wanted)
        # torch-npu's release notes allow older and newer CANN; vllm-ascend's documentation demands an equal one.
        if package == "vllm-ascend" and compare(version, wanted) < 0:
            return failure(version, f"{why} or newer", fix)
        return warning(version, f"{why}; other versions are untried", fix)
    return ok(f"{version} in {cann_home(machine)}")


def nnal(machine: Machine) -> Finding | None:
    version = next((_nnal_version(text) for path, text in machine.files.items() if "/nnal/" in path and text), "")
    evaluates = "vllm-ascend" in machine.packages
    if not version:
        if not evaluates:
            return ok("not installed (vllm-ascend needs it, training does not)")
        fix = f"bash Ascend-cann-nnal_{cann_version(machine) or '*'}_linux-{machine.arch}.run --install"
        return failure("not installed", "vllm-ascend loads its libatb.so", f"{fix} && source {NNAL_ENV}")
    if evaluates and "ATB_HOME_PATH" not in machine.env:
        return failure(f"{version}, but ATB_HOME_PATH is unset", "libatb.so will not be found", f"source {NNAL_ENV}")
    toolkit = cann_version(machine)
    if toolkit and series(toolkit) != series(version):
        fix = f"bash Ascend-cann-nnal_{toolkit}_linux-{machine.arch}.run --install"
        return warning(version, f"the toolkit is {toolkit}; the two are released together", fix)
    return ok(version)


NNAL_ENV = "/usr/local/Ascend/nnal/atb/set_env.sh"


def set_env(machine: Machine) -> Finding | None:
    home = cann_home(machine)
    if not home:
        return None
    scripts = [f"{folder}/set_env.sh" for folder in (home, os.path.dirname(home))]
    script = next((path for path in scripts if path in machine.files), scripts[0])
    chosen = machine.env.get("ASCEND_HOME_PATH", "")
    if not chosen:
        why = "torch_npu finds no library, and DeepSpeed stops with KeyError 'ASCEND_HOME_PATH'"
        return failure("ASCEND_HOME_PATH is unset", why, f"source {script}")
    if not any(path == chosen or path.startswith(chosen + "/") for path in machine.files):
        return failure(f"ASCEND_HOME_PATH={chosen} does not exist", "set_env.sh of a removed CANN", f"source {script}")
    if not any(
        entry.startswith(chosen) or "ascend-toolkit" in entry or "/cann" in entry for entry in _search_path(machine)
    ):
        return failure("LD_LIBRARY_PATH names no CANN folder", "libhccl.so will not be found", f"source {script}")
    return ok(f"ASCEND_HOME_PATH={chosen}")


def driver_version(machine: Machine) -> str:
    """From version.info, else npu-smi's own version, which is the driver's."""
    return _field(machine.files.get(DRIVER_INFO, ""), "Version") or machine.table.version


def cann_home(machine: Machine) -> str:
    """The toolkit's folder: ASCEND_HOME_PATH where it exists, else the first found."""
    homes = cann_homes(machine)
    chosen = machine.env.get("ASCEND_HOME_PATH", "")
    return chosen if chosen in homes else (homes[0] if homes else "")


def cann_homes(machine: Machine) -> list[str]:
    """The folders of all toolkits that are installed."""
    return [os.path.dirname(os.path.dirname(p)) for p in machine.files if p.endswith("/ascend_toolkit_install.info")]


def cann_version(machine: Machine) -> str:
    home = cann_home(machine)
    return _version_in(machine, home) if home else ""


def _version_in(machine: Machine, home: str) -> str:
    info = next((t for p, t in machine.files.items() if p.startswith(home + "/") and "toolkit_install" in p), "")
    return _field(info, "version")


def _toolkit_installer(machine: Machine, version: str) -> str:
    return f"bash Ascend-cann-toolkit_{version}.*_linux-{machine.arch}.run --install"


def _field(text: str, name: str) -> str:
    """`name=value` of a version.info, whatever the case of its name."""
    match = re.search(rf"^{name}\s*[=:]\s*(\S+)\s*$", text, re.MULTILINE | re.IGNORECASE)
    return match[1] if match else ""


def _nnal_version(text: str) -> str:
    """Of the "Ascend-cann-atb : 9.1.0" of NNAL's version.info, which some releases indent."""
    match = re.search(r"^\s*Ascend-cann-atb\s*[=:]\s*(\S+)\s*$", text, re.MULTILINE | re.IGNORECASE)
    return match[1] if match else _field(text, "Version")


def _search_path(machine: Machine) -> list[str]:
    return [entry for entry in machine.env.get("LD_LIBRARY_PATH", "").split(":") if entry]
