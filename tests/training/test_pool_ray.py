"""Workers of a training in a Ray cluster of this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile

import pytest

pytest.importorskip("ray")

from benchmarks._nodes import add_node, kill_node, ray_cluster, raylet, workers_below
from perl.base.errors import UserError
from perl.config.load import parse
from perl.training.preflight import check_run
from perl.workers.executors import make_executor
from tests.evaluation.test_run import wait_for
from tests.folders import write_sums
from tests.tiny import save_tiny
from tests.training.test_pool import FOUR_PIECES, same, train


@pytest.mark.ray
@pytest.mark.slow
def test_over_ray_a_run_is_that_of_processes_with_an_actor_killed_and_a_node_lost(tmp_path, monkeypatch):
    import ray

    model = save_tiny(tmp_path / "model", scale=4.0)
    processes, _, _ = train(model, tmp_path / "processes", 1, 1)
    with ray_cluster({"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        over_ray = {"executor": "ray", "ray_address": cluster.address}
        calm, _, _ = train(model, tmp_path / "calm", 2, 1, rollout=over_ray)
        assert same(processes, calm)
        events = {1: lambda: kill_actor(cluster), 3: lambda: lose_node(cluster)}
        monkeypatch.setattr("tests.training.test_pool.reward_tokens", at_each_call(events))
        disturbed, trainer, _ = train(model, tmp_path / "disturbed", 2, 1, rollout=over_ray)
        assert trainer.state.log_history[-2]["pool/restarts"] >= 1.0
        assert same(processes, disturbed)
        wait_for(lambda: not workers_below(map(raylet, cluster.list_all_nodes())), seconds=20)
    assert not ray.is_initialized()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_over_ray_a_run_is_that_of_processes_with_any_number_of_workers(tmp_path, lag):
    model = save_tiny(tmp_path / "model", scale=4.0)
    processes, _, _ = train(model, tmp_path / "processes", 1, lag, **FOUR_PIECES)
    with ray_cluster({"num_cpus": 4}) as cluster:
        over_ray = {"executor": "ray", "ray_address": cluster.address}
        for workers in (1, 2, 4):
            trained, _, _ = train(model, tmp_path / str(workers), workers, lag, rollout=dict(over_ray), **FOUR_PIECES)
            assert same(processes, trained)


def at_each_call(events):
    from tests.trainers import reward_tokens

    calls = []

    def reward(completion_ids):
        calls.append(len(calls))
        events.get(len(calls), lambda: None)()
        return reward_tokens(completion_ids)

    return reward


def kill_actor(cluster):
    """Of a worker on the head: the process above it."""
    worker = workers_below([raylet(cluster.head_node)])[0]
    with open(f"/proc/{worker}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)


def lose_node(cluster):
    kill_node(next(iter(cluster.worker_nodes)))
    add_node(cluster, num_cpus=1)


@pytest.mark.ray
@pytest.mark.slow
def test_too_few_slots_and_an_address_where_nothing_answers_name_the_trainings_flags(tmp_path):
    import ray

    with ray_cluster({"num_cpus": 1}) as cluster:
        address = cluster.address  # None after its shutdown
        with pytest.raises(UserError) as refused:
            make_executor("ray", 3, ray_address=address, taken=1)
        ray.shutdown()
    assert str(refused.value) == (
        f"--config.rollout.workers 3: the cluster at {address} has CPU 1 on 1 node(s), room for 1 workers;"
        " write --config.rollout.workers 1, or add nodes with ray start --address=HEAD:6379"
    )
    with pytest.raises(UserError, match=r"^--config\.rollout\.ray_address 127\.0\.0\.1:1: no Ray cluster answers"):
        make_executor("ray", 1, ray_address="127.0.0.1:1", taken=1)


NPUS = """
import os
import ray
from benchmarks._nodes import ray_cluster
from perl.base.errors import UserError
from perl.device import HIDDEN_DEVICES
from perl.workers.executors import make_executor

VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"

def workers(address):
    try:
        executor = make_executor("ray", 2, ray_address=address, taken=1)
        seen = ray.remote(lambda: os.environ[VARIABLE]).options(resources={"NPU": 2})
        print("workers see", sorted(ray.get(seen.remote()).split(",")))
    except UserError as error:
        print(str(error).replace(address, "HERE"))
    ray.shutdown()

npus = {"num_cpus": 1, "resources": {"NPU": 2}}
with ray_cluster(npus) as cluster:
    workers(cluster.address)
os.environ[VARIABLE] = "2,3"
with ray_cluster(npus) as cluster:
    del os.environ[VARIABLE]
    workers(cluster.address)
os.environ |= {VARIABLE: "0", HIDDEN_DEVICES: "1,2"}  # as the launch script does
workers("auto")
print(VARIABLE, os.environ[VARIABLE])
os.environ[HIDDEN_DEVICES] = ""
workers("auto")
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.npu
def test_devices_that_the_training_has_taken_are_not_rays(run_npu):
    """By their ids: the number of those that Ray has says nothing."""
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets lie below it
        said = run_npu([sys.executable, "-c", NPUS], devices=4, RAY_TMPDIR=folder).stdout.splitlines()
    assert said[-5:] == [
        "--config.rollout.executor ray: the cluster at HERE hands out NPU 0 of this machine, and the training has 0;"
        " here: ray stop --force; ASCEND_RT_VISIBLE_DEVICES=1,2,3 ray start --head --resources='{\"NPU\": 3}' (in the"
        " place of --head --address=HEAD:6379, where another node is the head)",
        "workers see ['2', '3']",
        "workers see ['1', '2']",
        "ASCEND_RT_VISIBLE_DEVICES 0",
        "--config.rollout.executor ray: the training takes all npu devices of this machine, and there is no cluster"
        " with others; start fewer processes (NUM_PROCESSES), or ray start --head here with none of these devices, and"
        " ray start --address=HEAD:6379 on the machines that draw",
    ]


@pytest.mark.ray
@pytest.mark.slow
def test_what_a_cluster_lacks_is_told_before_a_model_is_loaded(tmp_path):
    """It was after the validation before the training, and the folder was then refused to the next command."""
    import ray

    run, model = tmp_path / "run", save_tiny(tmp_path / "model", scale=4.0)

    def checked(workers, address):
        fields = {"model.model_name_or_path": model, "training.num_generations": 4}
        fields |= {"dataset.dataset_name_or_path": write_sums(tmp_path / "sums.jsonl")}
        fields |= {"rollout.executor": "ray", "rollout.ray_address": address, "rollout.workers": workers}
        flags = [word for name, value in fields.items() for word in (f"--config.{name}", str(value))]
        check_run(parse(flags).build(processes=1), run)

    with ray_cluster({"num_cpus": 1}) as cluster:
        checked(1, cluster.address)
        assert not ray.is_initialized()
        with pytest.raises(UserError, match=r"^--config\.rollout\.workers 2: .*, room for 1 workers; write --config"):
            checked(2, cluster.address)
        ray.shutdown()
        paths = [str(model), str(tmp_path / "none")]
        with pytest.raises(UserError, match=rf"^--config\.rollout\.executor ray: node \S+ has no {paths[1]}; models"):
            make_executor("ray", 1, ray_address=cluster.address, taken=1, paths=paths)
        ray.shutdown()
    assert not run.exists()
