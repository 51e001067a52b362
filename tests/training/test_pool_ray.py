"""Workers of a training in a Ray cluster of this machine."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("ray")

from benchmarks._nodes import add_node, kill_node, ray_cluster, raylet, workers_below
from perl.base.errors import UserError
from perl.workers.executors import make_executor
from tests.evaluation.test_run import wait_for
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


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.npu
def test_devices_that_the_training_has_taken_are_not_rays(run_npu):
    program = """
from benchmarks._nodes import ray_cluster
from perl.base.errors import UserError
from perl.workers.executors import make_executor
import ray
with ray_cluster({"num_cpus": 1, "resources": {"NPU": 4}}) as cluster:
    try:
        make_executor("ray", 1, ray_address=cluster.address, taken=1)
    except UserError as error:
        print(str(error).replace(cluster.address, "HERE"))
    ray.shutdown()
"""
    import sys

    said = run_npu([sys.executable, "-c", program], devices=4).stdout
    assert said.splitlines()[-1] == (
        "--config.rollout.executor ray: the cluster at HERE registered 4 NPU on this machine, where the training"
        " takes 1 and leaves 3; here: ray stop --force; ASCEND_RT_VISIBLE_DEVICES=1,2,3 ray start --head"
        " --resources='{\"NPU\": 3}' (in the place of --head --address=HEAD:6379, where another node is the head)"
    )
