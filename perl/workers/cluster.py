"""Workers in a Ray cluster: one actor a slot, each with a worker's process of its own on the node where Ray puts it.

The actor (WorkerActor) does on its node what the parent does at home: it starts the process, holds the pipe to it, and
passes requests and completions on. So a node that is lost looks like a worker that died, and a worker whose actor or
node is gone ends by itself. Ray shows each actor its own devices. Nodes need perl and the model under the same paths.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from perl import device
from perl.base.errors import UserError
from perl.device import RAY_RESOURCE, Devices, Kind
from perl.workers.local import KILL_S, ProcessLink
from perl.workers.worker import Deliver, Failed, RequestBatch, WorkerEvent, WorkerSpec

logger = logging.getLogger(__name__)

SLOTS_TIMEOUT_S = 15.0
"""How long slots that a run before has left may take to become free."""
PLACEMENT_TIMEOUT_S = 60.0
"""How long Ray may take to start one actor."""
LOOK_TIMEOUT_S = 300.0
"""How long a node may take to look at itself, its first process included."""
KILL_TIMEOUT_S = KILL_S + 5.0
KEPT: list[Any] = []
"""Actors whose worker's process does not end: without a handle Ray would end them."""
NOT_BY_RAY = "RAY_kill_child_processes_on_worker_exit"
"""As it ends an actor Ray would end the worker's process alone; by itself that ends with all that it has started."""
PROBE_TIMEOUT_S = 5.0
ROOT = Path(__file__).resolve().parents[2]
"""What has to be on sys.path for perl to be imported."""


class WorkerActor:
    """The actor: one worker on its node."""

    def __init__(self, spec: WorkerSpec):
        self._events: queue.SimpleQueue[WorkerEvent | None] = queue.SimpleQueue()
        self._batches = 0
        self._lost: str | None = None
        self._stuck: int | None = None
        missing = [path for path in spec.paths if not Path(path).exists()]
        self._link: ProcessLink | None = None
        if missing:
            self._events.put(Failed(_no_path(self.node(), missing[0])))
            self._events.put(None)
        else:
            self._link = ProcessLink(spec, self._events.put)

    def node(self) -> str:
        return socket.gethostname()

    @ray.method(concurrency_group="send")  # one after the other: a batch may need the weights that came with another
    def send(self, number: int, held: Sequence[ray.ObjectRef]) -> None:
        """Pass on the `number`th batch, the one that is `held`. A worker that has missed one ends: the next would be
        drawn from old weights."""
        if self._link is None or self._lost is not None:
            return
        try:
            if number != self._batches:
                raise LookupError(f"batch {number} came in the place of batch {self._batches}")
            self._batches += 1
            batch: RequestBatch | None = ray.get(held[0])
            if batch is not None and isinstance(batch.payload, ray.ObjectRef):
                batch = replace(batch, payload=ray.get(batch.payload))
            self._link.send(batch)
        except Exception as error:  # noqa: BLE001  # whatever it is, this batch is missed
            self._lost = f"what it was sent did not arrive, {_why(error)}"
            self.end()

    def receive(self) -> list[WorkerEvent | None]:
        """The worker's events since the last call, waiting for one."""
        events = [self._events.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def end(self) -> int | None:
        """End the worker and all its processes. Returns the one that SIGKILL does not end."""
        if self._link is not None:
            self._stuck = self._link.kill() or self._stuck
        return self._stuck

    def exit_reason(self) -> str:
        return self._lost or (self._link.exit_reason() if self._link is not None else "")


class ActorLink:
    """A worker behind an actor."""

    def __init__(self, spec: WorkerSpec, deliver: Deliver, options: Mapping[str, Any]):
        self._deliver = deliver
        self._exit_reason = "its actor was ended"
        self._index = spec.index
        self._batches = 0
        self._placed = False
        remote: Any = ray.remote
        self._actor: Any = remote(concurrency_groups={"send": 1})(WorkerActor).options(**options).remote(spec)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def send(self, batch: RequestBatch | None) -> None:
        # Held, and not an argument itself: Ray has a call wait for a large one, and not the calls after it.
        self._actor.send.remote(self._batches, [ray.put(batch)])
        self._batches += 1

    def join(self, timeout: float) -> None:
        self._listener.join(timeout)

    def kill(self) -> int | None:
        """First by its actor: a worker that hangs does not see that it has gone. Where its process does not end, the
        actor stays: Ray would give the device to another one."""
        process: Any = None
        if self._placed:
            with contextlib.suppress(RayError):
                process = ray.get(self._actor.end.remote(), timeout=KILL_TIMEOUT_S)
        if process is None:
            ray.kill(self._actor)
        elif self._actor not in KEPT:
            KEPT.append(self._actor)
        self._listener.join(KILL_TIMEOUT_S)
        return process

    def exit_reason(self) -> str:
        return self._exit_reason

    def _listen(self) -> None:
        """Runs in a thread of its own until the worker is gone."""
        try:
            node = ray.get(self._actor.node.remote(), timeout=PLACEMENT_TIMEOUT_S)
            self._placed = True
            logger.info("worker %d runs on %s", self._index, node)
            while True:
                for event in ray.get(self._actor.receive.remote()):
                    if event is None:
                        self._exit_reason = f"{ray.get(self._actor.exit_reason.remote())} on node {node}"
                        self._deliver(None)
                        return
                    self._deliver(event)
        except GetTimeoutError:
            where = f"cluster: {_listed(_total())}"
            self._exit_reason = f"Ray had no slot for it within {PLACEMENT_TIMEOUT_S:.0f} s ({where})"
        except RayError as error:
            self._exit_reason = _why(error)
        self._deliver(None)


class RayExecutor:
    """Joins a cluster, or starts one on this machine, and checks that it has the slots."""

    def __init__(self, dp_size: int, tp_size: int, address: str, taken: int | None = None, paths: Sequence[str] = ()):
        """Args:
            dp_size: workers.
            tp_size: devices of each.
            address: of the cluster; "auto": $RAY_ADDRESS, else the cluster that `ray start` began on this machine, else
                one of its own that ends with the run.
            taken, paths: as in make_executor.

        Raises:
            UserError: no cluster there, too few slots in it, slots on devices that the training has taken, or a node
                that lacks a path.
        """
        flags = EVALUATION if taken is None else TRAINING
        where = _join(address, flags, taken)
        kind = _kind(where, flags)
        imported = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        runtime_env = {"env_vars": {"PYTHONPATH": imported, NOT_BY_RAY: "0"}}
        if taken is not None:
            _require_nodes(where, kind, taken, paths, runtime_env)
        self.devices = Devices(kind, int(_total().get(RAY_RESOURCE[kind], 0)))
        self.workers = dp_size
        _require_slots(where, kind, dp_size, tp_size, flags)
        resource = RAY_RESOURCE[kind]
        amount: dict[str, Any] = {"num_cpus": tp_size} if kind == "cpu" else {"num_cpus": 0}
        if resource == "GPU":
            amount["num_gpus"] = tp_size
        elif kind != "cpu":
            amount["resources"] = {resource: tp_size}
        self._options = {
            **amount,
            "max_concurrency": 4,  # exit_reason while receive waits
            "max_restarts": 0,
            "runtime_env": runtime_env,
        }

    def environment(self, index: int) -> dict[str, str]:
        """Nothing: Ray shows each worker its devices."""
        return {}

    def start(self, spec: WorkerSpec, deliver: Deliver) -> ActorLink:
        return ActorLink(spec, deliver, self._options)

    def shared(self, payload: Any) -> Any:
        """In the object store, from where it crosses to each node once."""
        return ray.put(payload)

    def close(self) -> None:
        ray.shutdown()


class Flags(NamedTuple):
    """What a user writes."""

    workers: str
    executor: str
    address: str


EVALUATION = Flags("--dp_size", "--executor ray", "--ray_address")
TRAINING = Flags("--config.rollout.workers", "--config.rollout.executor ray", "--config.rollout.ray_address")


def _join(address: str, flags: Flags, taken: int | None) -> str:
    """Connect this process; returns what messages call the cluster. One that is started here has the devices that the
    training leaves."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    named, flag = _named(address, flags)
    if named == "auto" and (why := _none_here()):
        with _own_sigterm(), _beside(taken) as devices:
            ray.init(address="local", include_dashboard=False, **devices, **options)
        logger.info("Ray: %s, so a cluster was started for this run", why)
        return "of this machine"
    try:
        with _own_sigterm():
            ray.init(address=named, **options)
    except (OSError, ValueError) as error:  # ConnectionError among them
        raise _no_answer(named, flag, error) from error
    except (RayError, RuntimeError) as error:  # a token, or another version of Ray or Python
        raise UserError(f"{flag} {named}: Ray does not let this process join: {error}") from error
    where = f"at {ray.get_runtime_context().gcs_address}"
    logger.info("Ray: joined the cluster %s", where)
    return where


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """SIGTERM does afterwards what it did before: ray.init has it end the process at once, without a checkpoint."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other one may set it
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _beside(taken: int | None) -> Iterator[dict[str, Any]]:
    """Inside, a process that is started sees the devices that a training of `taken` processes leaves; gives what
    ray.init registers of them. On a CPU, and where `taken` is None, nothing."""
    here = device.detect()
    variable = device.VISIBILITY_VARIABLE[here.kind]
    if taken is None or variable is None:
        yield {}
        return
    if not (ids := device.ids_beside(taken)):
        raise UserError(
            f"{TRAINING.executor}: the training takes all {here.kind} devices of this machine, and there is no cluster"
            " with others; start fewer processes (NUM_PROCESSES), or ray start --head here with none of these devices,"
            " and ray start --address=HEAD:6379 on the machines that draw"
        )
    before, resource = os.environ.get(variable), RAY_RESOURCE[here.kind]
    os.environ[variable] = ",".join(ids)
    try:
        yield {"num_gpus": len(ids)} if resource == "GPU" else {"resources": {resource: len(ids)}}
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


def _named(address: str, flags: Flags) -> tuple[str, str]:
    """The cluster's address, or "auto", and where the user wrote it."""
    return (os.environ.get("RAY_ADDRESS", "auto"), "RAY_ADDRESS") if address == "auto" else (address, flags.address)


def _none_here() -> str:
    """Why there is no cluster on this machine to be joined; "": there is one.

    `ray start` writes its address into a file that is left behind where the cluster was killed, or the machine started
    again: Ray itself would then try for a quarter of an hour. A cluster that another run has started for itself is in
    no such file, and ends with that run.
    """
    folder = next(filter(None, map(os.environ.get, ("RAY_TMPDIR", "TMPDIR"))), "/tmp")
    file = Path(folder, "ray", "ray_current_cluster")
    if not file.is_file():
        return "none was started on this machine by ray start"
    address = file.read_text().strip()
    error = _unanswered(address)
    return f"nothing answers at {address}, which {file} names ({error})" if error else ""


def require_port(address: str, flags: Flags) -> None:
    """Raise a UserError when nothing listens at HOST:PORT, as ray.init would try for minutes."""
    named, flag = _named(address, flags)
    if error := _unanswered(named):
        raise _no_answer(named, flag, error) from error


def _unanswered(address: str) -> OSError | None:
    """The error of connecting to HOST:PORT; None: something listens, or it is no such address."""
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():
            socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None


def _no_answer(named: str, flag: str, error: Exception) -> UserError:
    return UserError(
        f"{flag} {named}: no Ray cluster answers ({error}); ray start --head prints its address, and a cluster"
        " with a token wants RAY_AUTH_MODE=token in the environment and the same ~/.ray/auth_token here"
    )


def _kind(where: str, flags: Flags) -> Kind:
    """The best kind of device that the cluster has registered."""
    total = _total()
    here = device.detect()
    if here.kind != "cpu" and not total.get(RAY_RESOURCE[here.kind]):
        raise UserError(
            f"{flags.executor}: this machine has {here.count} {here.kind} devices, but the Ray cluster {where}"
            f" registered {_listed(total)}; on each node: ray stop --force; ray start --head"
            f" {_registers(here.kind, here.count)} (on all but the first --address=HEAD:6379 in the place of --head"
            + ("" if flags is EVALUATION else ", and none of the training's own devices")
            + ")"
        )
    return next(kind for kind, resource in RAY_RESOURCE.items() if kind == "cpu" or total.get(resource))


def _registers(kind: Kind, count: int) -> str:
    """The flag by which `ray start` is given so many devices."""
    resource = RAY_RESOURCE[kind]
    return f"--num-gpus={count}" if resource == "GPU" else f"--resources='{json.dumps({resource: count})}'"


def look(paths: Sequence[str], variable: str | None) -> tuple[list[str], list[str] | None]:
    """Of a node, by a task there: which of `paths` it lacks, and the devices that its Ray was started with, as
    `variable` names them; None: all that there are."""
    missing = [path for path in paths if not Path(path).exists()]
    given = Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace")  # of the node's raylet
    for line in given.split("\0"):
        if variable and line.startswith(f"{variable}="):
            return missing, [each.strip() for each in line.partition("=")[2].split(",") if each.strip()]
    return missing, None


def _require_nodes(where: str, kind: Kind, taken: int, paths: Sequence[str], runtime_env: dict[str, Any]) -> None:
    """Raise a UserError where a node lacks one of `paths`, or where Ray may hand out devices of this machine that the
    training itself has taken."""
    resource, variable, task = RAY_RESOURCE[kind], device.VISIBILITY_VARIABLE[kind], ray.remote(look)
    this = ray.get_runtime_context().get_node_id()
    asked = []
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get(resource):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            options = task.options(num_cpus=0, runtime_env=runtime_env, scheduling_strategy=there)
            asked.append((node, options.remote(paths, variable)))
    for node, answer in asked:
        host, count = node["NodeManagerHostname"], int(node["Resources"][resource])
        try:
            missing, ids = ray.get(answer, timeout=LOOK_TIMEOUT_S)
        except RayError as error:
            raise UserError(f"{TRAINING.executor}: node {host} of the cluster {where}: {_why(error)}") from error
        if missing:
            raise UserError(f"{TRAINING.executor}: {_no_path(host, missing[0])}")
        if variable and node["NodeID"] == this:
            handed_out = [str(index) for index in range(count)] if ids is None else ids[:count]
            _require_others(where, kind, taken, handed_out)


def _require_others(where: str, kind: Kind, taken: int, handed_out: Sequence[str]) -> None:
    """Raise a UserError where Ray hands out a device of this machine that is the training's. An index and a UUID may
    name the same."""
    own, left = device.visible_ids()[:taken], device.ids_beside(taken)
    shared = [each for each in handed_out if own and (each in own or each.isdecimal() != own[0].isdecimal())]
    if shared:
        hidden = f"{device.VISIBILITY_VARIABLE[kind]}={','.join(left)} " if left else ""
        raise UserError(
            f"{TRAINING.executor}: the cluster {where} hands out {RAY_RESOURCE[kind]} {', '.join(shared)} of this"
            f" machine, and the training has {', '.join(own)}; here: ray stop --force; {hidden}ray start --head"
            f" {_registers(kind, len(left))} (in the place of --head --address=HEAD:6379, where another node is the"
            " head)"
        )


def _no_path(host: str, path: str) -> str:
    return (
        f"node {host} has no {path}; models and adapters have to be under the same path on every node, and an"
        " evaluation's --result_dir, where an adapter is merged"
    )


def _require_slots(where: str, kind: Kind, dp_size: int, tp_size: int, names: Flags) -> None:
    """Raise a UserError, soon, when there are fewer slots than workers."""
    resource = RAY_RESOURCE[kind]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    slots = slots_of(nodes, resource, tp_size)
    flags = f"{names.workers} {dp_size}" + (f" × --tp_size {tp_size}" if tp_size > 1 else "")
    if slots < dp_size:
        raise UserError(
            f"{flags}: the cluster {where} has {_listed(_total())} on {len(nodes)} node(s), room for {slots} workers"
            f"; write {names.workers} {max(slots, 1)}, or add nodes with ray start --address=HEAD:6379"
        )
    deadline = time.monotonic() + SLOTS_TIMEOUT_S
    while (free := ray.available_resources().get(resource, 0)) < dp_size * tp_size:
        if time.monotonic() > deadline:
            raise UserError(
                f"{flags}: {free:g} of {_total()[resource]:g} {resource} of the cluster {where} are free, other jobs"
                f" hold the rest; wait for them, or write a smaller {names.workers}"
            )
        time.sleep(0.5)


def slots_of(nodes: Sequence[Mapping[str, float]], resource: str, each: int) -> int:
    """How many workers of `each` devices fit: one worker's devices are on one node."""
    return sum(int(node.get(resource, 0)) // each for node in nodes)


def _total() -> Mapping[str, float]:
    return ray.cluster_resources()


def _listed(resources: Mapping[str, float]) -> str:
    """Such as "GPU 8, CPU 64"."""
    return (
        ", ".join(f"{name} {resources[name]:g}" for name in ("NPU", "GPU", "CPU") if resources.get(name)) or "nothing"
    )


def _why(error: Exception) -> str:
    text = str(error)
    if "No module named 'perl'" in text:
        return f"perl cannot be imported on its node; install it there, or put it under {ROOT} as here"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
