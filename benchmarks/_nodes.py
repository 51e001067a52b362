"""A real Ray cluster on this machine, and the processes of an evaluation, for whoever kills some of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""A lost node is noticed within seconds."""
STORE_BYTES = 80_000_000


@contextlib.contextmanager
def ray_cluster(*nodes: dict[str, Any]) -> Iterator[Any]:
    """A ray.cluster_utils.Cluster of `nodes` (num_cpus, num_gpus, resources), the first one its head. It is gone
    afterwards."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"  # whatever token lies in the home directory
    first, *others = nodes
    head = {"object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": HEALTH, **first}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for node in others:
            add_node(cluster, **node)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any, **node: Any) -> None:
    cluster.add_node(object_store_memory=STORE_BYTES, **node)


def kill_node(node: Any) -> None:
    """kill -9 of the node's raylet, as when its machine goes; its workers end as they lose it."""
    os.kill(raylet(node), signal.SIGKILL)


def raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def children(pid: int) -> list[int]:
    """Direct children of a process; none where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def workers_below(roots: Iterable[int]) -> list[int]:
    """Worker processes of an evaluation among the descendants of `roots`, and all below them."""
    below = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                below[int(fields[1])].append(int(folder.name))
    workers = [pid for pid in _descendants(roots, below) if _is_worker(pid)]
    return sorted({*workers, *_descendants(workers, below)})


def _descendants(roots: Iterable[int], children: dict[int, list[int]]) -> list[int]:
    found = []
    for root in roots:
        for child in children.get(root, ()):
            found += [child, *_descendants([child], children)]
    return found


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
