"""HCCL's variables, ports and network interface."""

from __future__ import annotations

import re

from perl.tools.doctor.findings import Finding, failure, ok, warning
from perl.tools.doctor.machine import Machine

HCCL_PORT, HCCL_PORTS = 60000, 32
"""CANN 8.3 and newer take 32 ports from HCCL_IF_BASE_PORT on; older ones 16."""
LAUNCHER_PORT = 29500
RANGES = {
    "HCCL_BUFFSIZE": (1, 2147483647, "MB; each communicator takes twice as much HBM"),
    "HCCL_CONNECT_TIMEOUT": (120, 7200, "seconds"),
    "HCCL_EXEC_TIMEOUT": (0, 2147483647, "seconds"),
    "HCCL_IF_BASE_PORT": (1024, 65520, "a port"),
}
RECOMMENDED = {
    "HCCL_OP_BASE_FFTS_MODE_ENABLE": "TRUE",
    "HCCL_WHITELIST_DISABLE": "1",
    "VLLM_ASCEND_ENABLE_NZ": "0",
}


def hccl(machine: Machine) -> Finding | None:
    """Values that HCCL refuses, or that differ from what the launch script sets when they are unset."""
    for name, (low, high, unit) in RANGES.items():
        value = machine.env.get(name)
        if value is not None and not (value.isdigit() and low <= int(value) <= high):
            why = f"HCCL takes an integer from {low} to {high} ({unit})"
            default = {"HCCL_BUFFSIZE": "512", "HCCL_CONNECT_TIMEOUT": "1200", "HCCL_IF_BASE_PORT": "60000"}
            fix = f"export {name}={default[name]}" if name in default else f"unset {name}"
            return failure(f"{name}={value}", why, fix)
    white = machine.env.get("HCCL_WHITELIST_DISABLE")
    if white == "0" and "HCCL_WHITELIST_FILE" not in machine.env:
        why = "the communication whitelist is on, and no file lists the hosts: ranks cannot connect"
        return failure("HCCL_WHITELIST_DISABLE=0", why, "export HCCL_WHITELIST_DISABLE=1")
    odd = {k: machine.env[k] for k, good in RECOMMENDED.items() if machine.env.get(k, good).upper() != good}
    if odd:
        found = ", ".join(f"{name}={value}" for name, value in odd.items())
        fix = " ".join(f"{name}={RECOMMENDED[name]}" for name in odd)
        return warning(found, "the guide's runs used other values (docs/ascend.md says why)", f"export {fix}")
    shown = [f"{name}={value}" for name, value in sorted(machine.env.items()) if name.startswith("HCCL_")]
    return ok(", ".join(shown) if shown else "unset; scripts/trl/openr1/dapo_lora_npu.sh sets them")


def ports(machine: Machine) -> Finding | None:
    """The ports on which ranks meet."""
    free = [str(LAUNCHER_PORT)]
    if machine.kind == "npu":
        wanted = hccl_ports(machine.env)
        taken = [port for port in machine.listening if any(port in ports for ports in wanted)]
        if taken:
            other = next(
                b for b in range(HCCL_PORT, 0, -1000) if not set(range(b, b + HCCL_PORTS)) & set(machine.listening)
            )
            why = "HCCL cannot bind there (EJ0003): another job runs, or something else took the port"
            return failure(f"in use: {', '.join(map(str, taken))}", why, f"export HCCL_IF_BASE_PORT={other}")
        free += [f"{ports[0]} to {ports[-1]}" for ports in wanted]
    if LAUNCHER_PORT in machine.listening:
        why = "torchrun's and accelerate's default meeting point"
        return warning(f"{LAUNCHER_PORT} is in use", why, "accelerate launch --main_process_port 29600 …")
    return None if machine.kind == "cpu" else ok(f"free: {', '.join(free)}")


def hccl_ports(env: dict[str, str]) -> list[range]:
    """The ports that HCCL will take: HCCL_HOST_SOCKET_PORT_RANGE ("60000-60050,60100", "auto"), else the base's 32."""
    chosen = env.get("HCCL_HOST_SOCKET_PORT_RANGE", "")
    if chosen == "auto":
        return []
    ranges = re.findall(r"(\d+)(?:-(\d+))?", chosen)
    if ranges:
        return [range(int(low), int(high or low) + 1) for low, high in ranges]
    base = env.get("HCCL_IF_BASE_PORT", "")
    first = int(base) if base.isdigit() else HCCL_PORT
    return [range(first, first + HCCL_PORTS)]


def interface(machine: Machine) -> Finding | None:
    """HCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and HCCL_IF_IP name something that exists."""
    names, env = machine.interfaces, machine.env
    if not names:
        return None
    usable = [name for name, address in names.items() if address and name != "lo" and not name.startswith("docker")]
    best = usable[0] if usable else "lo"
    for variable in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if variable not in env:
            continue
        exact = variable.startswith(("GLOO", "TP"))  # of gloo's and vLLM's a list of names, no rule
        chosen = matching_interfaces(f"{'=' * exact}{env[variable]}", list(names))
        if not chosen:
            found = f"{variable}={env[variable]}, but there are {', '.join(names)}"
            return failure(found, "ranks cannot find each other", f"export {variable}={best}")
        if not any(names[name] for name in chosen):
            found = f"{variable}={env[variable]}: {chosen[0]} has no IPv4 address"
            return failure(found, "ranks cannot find each other", f"export {variable}={best}")
    address = env.get("HCCL_IF_IP")
    if address and ":" not in address and address not in names.values():
        why = f"this machine has {', '.join(sorted(set(filter(None, names.values()))))}"
        return failure(f"HCCL_IF_IP={address}", why, f"export HCCL_IF_IP={names[best]}")
    if machine.kind == "cpu":
        return None
    several = f" ({len(usable)} to choose from: for two nodes, name one)" if len(usable) > 1 else ""
    return ok(f"{env.get('HCCL_SOCKET_IFNAME') or best}{several}")


def matching_interfaces(rule: str, names: list[str]) -> list[str]:
    """HCCL's and NCCL's grammar: "eth" is a prefix, "=eth0" a name, "^" before either excludes."""
    exclude, rule = rule.startswith("^"), rule.lstrip("^")
    exact, rule = rule.startswith("="), rule.lstrip("=")
    parts = [part for part in rule.split(",") if part]
    hit = {n for n in names for part in parts if (n == part if exact else n.startswith(part))}
    return [n for n in names if (n not in hit and n != "lo" if exclude else n in hit)]
