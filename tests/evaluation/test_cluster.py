"""--executor ray on real clusters of nodes on this machine."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import pickle
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from benchmarks._nodes import add_node, alive, kill_node, ray_cluster, raylet, workers_below
from perl.base.errors import UserError
from perl.config.evaluation import EvalConfig, parse
from perl.workers import cluster
from perl.workers.cluster import WorkerActor, slots_of
from perl.workers.executors import make_executor
from perl.workers.worker import (
    EngineJob,
    Failed,
    Inbox,
    Ready,
    RequestBatch,
    Result,
    WeightsSpec,
    WorkerEvent,
    WorkerSpec,
    require_device,
)
from tests.evaluation.conftest import read
from tests.evaluation.test_run import lines, wait_for
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]


def run(config: EvalConfig, **variables: str) -> subprocess.Popen[str]:
    given = {name: value for name, value in vars(config).items() if value is not None and name != "environment"}
    flags = [f"--{name}={value}" for name, value in given.items()]
    command = [sys.executable, str(ROOT / "perl" / "eval.py"), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **variables}, **pipes)


def outcome(run: subprocess.Popen[str], timeout: float = 240) -> tuple[int, str]:
    """Exit code and standard error."""
    try:
        _, errors = run.communicate(timeout=timeout)
    finally:
        run.kill()
    return run.returncode, errors


def test_a_node_imports_perl_from_where_it_lies_here():
    assert (cluster.ROOT / "perl" / "workers" / "cluster.py").samefile(cluster.__file__)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_over_two_nodes_of_which_one_is_killed_is_that_of_one_machine(config, undisturbed, tmp_path):
    settings = replace(config, result_dir=str(tmp_path), dp_size=2, executor="ray", max_batch_tokens=130)
    with ray_cluster({"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        process = run(settings, RAY_ADDRESS=cluster.address)
        wait_for(lambda: lines(tmp_path) > 20 or process.poll() is not None)
        kill_node(next(iter(cluster.worker_nodes)))
        add_node(cluster, num_cpus=1)
        code, errors = outcome(process)
        wait_for(lambda: not workers_below(map(raylet, cluster.list_all_nodes())), seconds=20)
        assert f"joined the cluster at {cluster.address}" in errors
    assert code == 0, errors
    assert re.search(r"worker \d died: .*; its \d+ rows go back, it starts again", errors), errors
    assert read(tmp_path) == undisturbed
    generation = json.loads((tmp_path / "sums" / "summary.json").read_text())["generation"]
    assert (generation["executor"], generation["dp_size"], generation["device"]) == ("ray", 2, "cpu")
    assert generation["worker_restarts"] >= 1


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.npu
def test_emulated_npus_are_slots_and_npus_registered_as_gpus_are_refused(config, npu_env, tmp_path, monkeypatch):
    for name, value in npu_env(2).items():
        monkeypatch.setenv(name, value)
    settings = replace(config, n=1, max_samples=12, executor="ray", dp_size=2, max_batch_tokens=500)
    with ray_cluster({"num_cpus": 1, "num_gpus": 2}) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        code, errors = outcome(run(replace(settings, result_dir=str(tmp_path / "gpus"))))
        assert code == 2
        assert errors == (
            f"INFO Ray: joined the cluster at {cluster.address}\n"
            f"error: --executor ray: this machine has 2 npu devices, but the Ray cluster at {cluster.address}"
            " registered GPU 2, CPU 1; on each node: ray stop --force; ray start --head --resources='{\"NPU\": 2}' (on"
            " all but the first --address=HEAD:6379 in the place of --head)\n"
        )
        add_node(cluster, num_cpus=0, resources={"NPU": 2})
        code, errors = outcome(run(replace(settings, result_dir=str(tmp_path / "three"), dp_size=3)))
        assert code == 2
        assert errors.splitlines()[-1] == (
            f"error: --dp_size 3: the cluster at {cluster.address} has NPU 2, GPU 2, CPU 1 on 2 node(s), room for 2"
            " workers; write --dp_size 2, or add nodes with ray start --address=HEAD:6379"
        )
        code, errors = outcome(run(replace(settings, result_dir=str(tmp_path / "npus"))))
        assert code == 0, errors
    generation = json.loads((tmp_path / "npus" / "sums" / "summary.json").read_text())["generation"]
    assert (generation["device"], generation["dp_size"]) == ("npu", 2)
    assert len(read(tmp_path / "npus")) == 12


def test_a_worker_of_several_devices_has_them_on_one_node():
    nodes = [{"NPU": 8.0, "CPU": 64.0}, {"NPU": 3.0}, {"CPU": 4.0}]
    assert slots_of(nodes, "NPU", 1) == 11
    assert slots_of(nodes, "NPU", 2) == 5
    assert slots_of(nodes, "NPU", 4) == 2
    assert slots_of(nodes, "GPU", 1) == 0


def test_a_node_without_the_model_says_so(tmp_path):
    spec = WorkerSpec(
        index=0,
        device="cpu",
        job=pickle.dumps(EngineJob("hf", {})),
        paths=[str(tmp_path / "nowhere")],
        weights=WeightsSpec(str(tmp_path / "nowhere"), "auto"),
        environment={},
        log=tmp_path / "log",
    )
    failed, end = WorkerActor(spec).receive()
    assert isinstance(failed, Failed)
    assert end is None
    assert failed.message.startswith(f"node {socket.gethostname()} has no {tmp_path}/nowhere; models and adapters have")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("missed", ["a payload that is gone", "a batch"])
def test_a_worker_that_misses_what_it_is_sent_ends_before_it_takes_more(tmp_path, missed):
    import ray

    @ray.remote(num_cpus=0)
    def lost():
        raise OSError("Broken pipe")

    events: queue.SimpleQueue = queue.SimpleQueue()
    with ray_cluster({"num_cpus": 1}) as cluster:
        executor = make_executor("ray", 1, ray_address=cluster.address)
        weights = WeightsSpec(str(save_tiny(tmp_path / "model")), "float32")
        spec = WorkerSpec(
            index=0,
            device="cpu",
            job=pickle.dumps(EngineJob("hf", {})),
            weights=weights,
            environment={},
            log=tmp_path / "log",
        )
        link = executor.start(spec, events.put)
        if missed == "a batch":
            link._actor.send.remote(1, [ray.put(RequestBatch(weights, []))])
        else:
            link.send(RequestBatch(weights, [], lost.remote()))
        while events.get(timeout=120) is not None:
            pass
        why = link.exit_reason()
        wait_for(lambda: not workers_below(map(raylet, cluster.list_all_nodes())), seconds=20)
        executor.close()
    said = {
        "a batch": "LookupError: batch 1 came in the place of batch 0",
        "a payload that is gone": r"RayTaskError\(OSError\): .*lost.*",
    }
    assert re.fullmatch(rf"what it was sent did not arrive, {said[missed]} on node \S+", why), why


class Lengths:
    """A job that answers each request, a text, with its length."""

    unit = "rows"

    def paths(self, weights: Any) -> list[str]:
        return []

    def serve(self, weights: Any, inbox: Inbox) -> Iterator[WorkerEvent]:
        yield Ready(1)
        while inbox.next_weights(wait=True) is not None:
            yield Result((len(inbox.take()),), None, 1)


class Parent:
    """A job that has started a program, as a tool may, and answers with both process ids."""

    unit = "rows"

    def paths(self, weights: Any) -> list[str]:
        return []

    def serve(self, weights: Any, inbox: Inbox) -> Iterator[WorkerEvent]:
        yield Result((os.getpid(), subprocess.Popen(["sleep", "600"]).pid), None, 1)
        inbox.next_weights(wait=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_what_a_worker_has_started_ends_with_it(tmp_path, hangs):
    import ray

    events: queue.SimpleQueue = queue.SimpleQueue()
    with ray_cluster({"num_cpus": 1}) as cluster:
        executor = make_executor("ray", 1, ray_address=cluster.address)
        job = pickle.dumps(Parent())
        spec = WorkerSpec(index=0, device="cpu", job=job, weights=0, environment={}, log=tmp_path / "log")
        link: Any = executor.start(spec, events.put)
        worker, program = events.get(timeout=120).id
        assert alive(program)
        if hangs:
            os.kill(worker, signal.SIGSTOP)
            link.kill()
        else:
            ray.kill(link._actor)  # as where the process that started it is killed
        wait_for(lambda: not alive(program) and not alive(worker), seconds=20)
        link.kill()
        executor.close()


class Stuck(WorkerActor):
    """Its worker's process waits in the kernel."""

    def end(self) -> int | None:
        super().end()
        return 4242


@pytest.mark.ray
@pytest.mark.slow
def test_a_process_that_does_not_end_keeps_its_slot(tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(cluster, "WorkerActor", Stuck)
    events: queue.SimpleQueue = queue.SimpleQueue()
    with ray_cluster({"num_cpus": 1}) as nodes:
        executor = make_executor("ray", 1, ray_address=nodes.address)
        job = pickle.dumps(Lengths())
        spec = WorkerSpec(index=0, device="cpu", job=job, weights=0, environment={}, log=tmp_path / "log")
        link = executor.start(spec, events.put)
        assert isinstance(events.get(timeout=120), Ready)
        assert link.kill() == 4242
        del link  # as the pool does
        gc.collect()
        time.sleep(5.0)
        assert not ray.available_resources().get("CPU")
        executor.close()


@pytest.mark.ray
@pytest.mark.slow
def test_a_large_batch_is_not_overtaken_on_its_way_to_another_node(tmp_path):
    events: queue.SimpleQueue = queue.SimpleQueue()
    with ray_cluster({"num_cpus": 0}, {"num_cpus": 1}) as cluster:
        executor = make_executor("ray", 1, ray_address=cluster.address)
        job = pickle.dumps(Lengths())
        spec = WorkerSpec(index=0, device="cpu", job=job, weights=0, environment={}, log=tmp_path / "log")
        link = executor.start(spec, events.put)
        assert isinstance(events.get(timeout=120), Ready)
        lengths = [20_000_000, 1, 2, 10_000_000, 3, 4]
        for length in lengths:
            link.send(RequestBatch(0, ["x" * length]))
        assert [events.get(timeout=120) for _ in lengths] == [Result((length,), None, 1) for length in lengths]
        link.kill()
        executor.close()


def test_a_slot_of_another_kind_of_device_is_an_error():
    require_device("npu", "npu")
    with pytest.raises(UserError, match=r"a device of kind cuda, but has kind npu: .* with NPU in --resources"):
        require_device("cuda", "npu")


def test_an_address_where_nobody_listens_is_an_error_at_once():
    with pytest.raises(UserError, match=r"--ray_address 127\.0\.0\.1:1: no Ray cluster answers"):
        make_executor("ray", 1, ray_address="127.0.0.1:1")


@pytest.mark.ray
def test_a_cluster_that_was_killed_is_not_joined(monkeypatch, caplog):
    """Its address is left behind; Ray would ask there for a quarter of an hour."""
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets lie below it
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        left = Path(folder, "ray", "ray_current_cluster")
        left.parent.mkdir()
        left.write_text("127.0.0.1:1\n")
        with caplog.at_level("INFO"):
            make_executor("ray", 1).close()
        assert f"nothing answers at 127.0.0.1:1, which {left} names" in caplog.text


@pytest.mark.ray
def test_sigterm_stays_what_it_was_where_a_cluster_is_begun_or_joined(monkeypatch):
    """ray.init had it end the process at once: a training saved no checkpoint, an evaluation had no last line."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    handler = lambda *_: None  # noqa: E731
    before = signal.getsignal(signal.SIGTERM)
    try:
        with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets lie below it
            monkeypatch.setenv("RAY_TMPDIR", folder)
            monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
            signal.signal(signal.SIGTERM, handler)
            make_executor("ray", 1).close()
            assert signal.getsignal(signal.SIGTERM) is handler
            with ray_cluster({"num_cpus": 1}) as nodes:
                signal.signal(signal.SIGTERM, handler)
                make_executor("ray", 1, ray_address=nodes.address).close()
                assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--executor ray: ray is not installed; pip install \"ray"):
        make_executor("ray", 1)


def test_an_address_without_ray_has_no_effect():
    with pytest.raises(UserError, match=r"--ray_address 10\.0\.0\.1:6379: has no effect without --executor ray"):
        parse(["--model", "m", "--dataset", "gsm8k", "--ray_address", "10.0.0.1:6379"])


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_with_a_token_says_what_joining_it_takes(config, tmp_path, monkeypatch):
    """Ray shows the token to a cluster that it is given the address of only when it is told to."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    settings = replace(config, n=1, max_samples=4, executor="ray", result_dir=str(tmp_path / "out"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings.ray_address = f"127.0.0.1:{free.getsockname()[1]}"
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = ["start", "--head", "--num-cpus=1", f"--port={settings.ray_address.rpartition(':')[2]}"]
    head += ["--include-dashboard=false", "--block"]
    cluster = subprocess.Popen([*ray, *head], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(settings.ray_address), seconds=60)
        code, errors = outcome(run(settings))
        assert code == 2
        last = errors.splitlines()[-1]
        assert last.startswith(f"error: --ray_address {settings.ray_address}: no Ray cluster answers"), errors
        assert "RAY_AUTH_MODE=token in the environment and the same ~/.ray/auth_token" in last
        code, errors = outcome(run(settings, RAY_AUTH_MODE="token"))
        assert code == 0, errors
    finally:
        cluster.terminate()
        cluster.wait(timeout=60)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
