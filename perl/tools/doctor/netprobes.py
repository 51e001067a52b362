"""What the machine's network looks like: listening ports, interfaces, hosts that answer."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

from perl.tools.doctor.checks.network import HUBS, host_of
from perl.tools.doctor.local import read

HOST_S = 1.5
"""Limit for a connection, name look-up included."""


def listening(root: Path) -> list[int]:
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in read(root / "proc/net" / name).splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == "0A":
                ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


def interfaces() -> dict[str, str]:
    import fcntl
    import struct

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(packed[20:24])
            except OSError:
                found[name] = ""
    return found


def hosts(env: dict[str, str]) -> dict[str, str]:
    """Whether a TCP connection opens, within HOST_S each, all at once. Behind a proxy, whether the proxy answers."""
    if env.get("HF_HUB_OFFLINE", "").lower() in ("1", "true"):
        return {}
    endpoint = env.get("HF_ENDPOINT", "")
    targets = [host_of(endpoint) if endpoint else HUBS["huggingface"], HUBS["modelscope"]]
    if "WANDB_API_KEY" in env:
        targets.append("api.wandb.ai:443")
    proxy = next((v for k, v in env.items() if k.lower() in ("https_proxy", "all_proxy") and v), "")
    answers = dict.fromkeys(targets, f"no answer in {HOST_S} s")
    threads = []
    for target in targets:

        def connect(target: str = target) -> None:
            host, port = (host_of(proxy) if proxy else target).rsplit(":", 1)
            try:
                socket.create_connection((host, int(port)), timeout=HOST_S).close()
                answers[target] = ""
            except OSError as error:
                answers[target] = ("proxy: " if proxy else "") + (error.strerror or str(error))

        threads.append(threading.Thread(target=connect, daemon=True))
        threads[-1].start()
    until = time.monotonic() + HOST_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(answers)
