"""vLLM, real, in the workers of a training: a run is the same with one worker, two or four, of processes or Ray, under
noise, with and without a lag; the digest of what vLLM serves is the trainer's, whichever method made it; and what
arrives wrong has another."""

from __future__ import annotations

import importlib.util
import shutil
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from perl.adapters import ADAPTERS
from perl.adapters.delivery import delivered, from_bytes, to_bytes
from perl.base.errors import UserError
from perl.config.checks import check_workers
from perl.config.peft_fields import UNMERGED
from perl.config.schema import NoiseConfig, PeftConfig, RolloutConfig
from perl.engines.vllm import ENVIRONMENT
from perl.engines.vllm_copy import outline, sent_digest
from perl.models.folders import content_hash, load_model
from perl.noise.injector import NoiseInjector
from perl.records import Sampling, Weights
from perl.training.pool import PoolLost, require_sent
from perl.workers.rollouts import Drawn, Version
from tests.engines.test_vllm import make_prompts
from tests.engines.test_vllm_quantised import SIZES
from tests.tiny import END, save_tiny
from tests.trainers import SUMS, make_trainer, move_adapter, reward_tokens

NOISE = NoiseConfig(enabled=True, seed=3, sigma_start=0.1, sigma_end=0.01, num_stages=3)
OPTIONS: dict[str, Any] = {
    "gpu_memory_utilization": 0.3,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "model_impl": "vllm",
    "trust_remote_code": False,
    "quantization": None,
}
NOISY = Weights(version=3, sigma=0.1, draw=1)
OTHER_METHODS = [method for method in UNMERGED if method != "lora"]


def train(
    model: Path, folder: Path, workers: int, **rollout: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    loaded = load_model(model)
    loaded.name_or_path = str(model)
    trainer = make_trainer(
        folder, model=loaded, engine="vllm", use_vllm=True, noise=NOISE, max_steps=4, prompts=SUMS,
        rewards=[lambda completion_ids, **columns: reward_tokens(completion_ids)], vllm_max_model_length=64,
        rollout={"workers": workers, "lag": 1, "piece_size": 4} | rollout,
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        trainer.step.engine.close()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return weights, trainer.state.log_history


def policy(base: Path, seed: int, method: str = "lora", **peft: Any) -> Any:
    config = PeftConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | peft))
    wrapped = get_peft_model(load_model(base, dtype=torch.float32), ADAPTERS[method].build(config)).eval()
    move_adapter(wrapped, 0.5, seed)
    return wrapped


def in_worker(base: Path, dtype: torch.dtype) -> dict[str, Any]:
    """All that the tests look at (runs in the child): the digests of both ends, and what is drawn."""
    import os

    os.environ.update(ENVIRONMENT)
    from perl.engines.vllm_copy import VLLMCopy

    sender = policy(base, 5)
    noise = NoiseInjector.of(sender, NOISE)
    copy = VLLMCopy(
        str(base), sender.peft_config["default"], OPTIONS, dtype=dtype, generation_kwargs={}, regex=None,
        noise=outline(noise), eos_token_ids=[END],
    )  # fmt: skip
    prompts = [replace(prompt, sampling=Sampling(max_new_tokens=20)) for prompt in make_prompts(16)]
    found: dict[str, Any] = {"sent": {}, "held": {}, "drawn": {}}

    def send(name: str, of: Any, weights: Weights, spoiled: Any = lambda tensors: None) -> None:
        tensors = {key: tensor.clone() for key, tensor in delivered(of).items()}
        spoiled(tensors)
        with copy.holding(weights, name, (to_bytes(tensors), [])) as held:
            found["held"][name] = held
            pieces = [dict(copy.stream(prompts[first : first + 8])) for first in (0, 8)]
        found["drawn"][name] = [[piece[place].token_ids for place in sorted(piece)] for piece in pieces]
        found["sent"][name] = sent_digest(of, content_hash(base), noise, weights, dtype)

    clean = Weights(version=3)
    send("clean", sender, clean)
    send("noisy", sender, NOISY)
    send("other", policy(base, 6), clean)
    send("again", sender, clean)
    for method in OTHER_METHODS:
        of = policy(base, 8, method, lora_alpha=7)  # of which no power of 2 is the scale
        copy.peft_config = of.peft_config["default"]
        send(method, of, clean)
    copy.peft_config = sender.peft_config["default"]
    send("half", sender, clean, lambda tensors: next(iter(tensors.values())).zero_())
    (found["served"],) = copy.llm.apply_model(lambda model: sorted(model.lora_manager.list_adapters()))
    copy.peft_config.lora_alpha = 16
    send("scale", sender, clean)
    copy.peft_config.lora_alpha = 8
    applied, copy.noise.applied = copy.noise.applied, lambda sigma, draw: nullcontext()
    send("noise withheld", sender, NOISY)
    copy.noise.applied = applied
    copy.sync.serve = lambda llm, save, of: None
    send("not loaded", policy(base, 7), clean)
    copy.close()
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    return save_tiny(tmp_path_factory.mktemp("model"), scale=8.0)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_vllm_serves_has_the_trainers_digest_and_what_arrives_wrong_has_not(base, dtype):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(in_worker, base, dtype).result(timeout=300)
    held, sent, drawn = found["held"], found["sent"], found["drawn"]
    right = ["clean", "noisy", "other", "again", *OTHER_METHODS]
    assert [held[name] for name in right] == [sent[name] for name in right]
    assert held["noise withheld"] == held["not loaded"] == held["clean"] == held["again"]
    assert len({*held.values()}) == 5 + len(OTHER_METHODS)
    for name in ("half", "scale", "noise withheld", "not loaded"):
        assert held[name] != sent[name]
    assert drawn["again"] == drawn["clean"]
    assert all(drawn[name] != drawn["clean"] for name in ("noisy", "other", "half", "scale", *OTHER_METHODS))
    assert found["served"] == [5 + len(OTHER_METHODS)]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_is_the_same_with_one_worker_and_with_four(base, tmp_path):
    one, logged = train(base, tmp_path / "one", 1, lag=2)
    four, _ = train(base, tmp_path / "four", 4, lag=2)
    assert all(torch.equal(one[name], four[name]) for name in one)
    rows = [row for row in logged if "rollout/engine_mismatch" in row]
    assert [row["pool/staleness"] for row in rows] == [0.0, 1.0, 2.0, 2.0]
    assert all(row["rollout/engine_mismatch"] < 1e-3 for row in rows)


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.slow
def test_without_a_lag_and_over_ray_too(base, tmp_path):
    pytest.importorskip("ray")
    from benchmarks._nodes import ray_cluster

    one, logged = train(base, tmp_path / "one", 1, lag=0)
    with ray_cluster({"num_cpus": 2}) as cluster:
        two, _ = train(base, tmp_path / "two", 2, lag=0, executor="ray", ray_address=cluster.address)
    assert all(torch.equal(one[name], two[name]) for name in one)
    rows = [row for row in logged if "rollout/engine_mismatch" in row]
    assert [row["pool/staleness"] for row in rows] == [0.0] * 4
    assert all(row["rollout/engine_mismatch"] < 1e-3 for row in rows)


@pytest.mark.vllm
@pytest.mark.slow
def test_with_a_quantised_base_too(tmp_path):
    base = save_tiny(tmp_path / "base", scale=8.0, **SIZES)
    one, logged = train(base, tmp_path / "one", 1, quantization="int8_w8a8")
    two, _ = train(base, tmp_path / "two", 2, quantization="int8_w8a8")
    assert all(torch.equal(one[name], two[name]) for name in one)
    rows = [row for row in logged if "rollout/engine_mismatch" in row]
    assert [row["pool/staleness"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    for row in rows:
        assert 1e-3 < row["rollout/engine_mismatch"] < 0.5
        assert row["rollout/quantization_kl"] > 1e-4
        assert row["aqn/kl"] > 1e-6


def test_what_a_trainer_says_that_it_sent_is_of_base_scale_adapter_and_noise(tmp_path):
    """A base that differs in one weight was another node's copy, seen by its log-probabilities alone."""
    folder = save_tiny(tmp_path / "base", scale=8.0)
    sender, clean = policy(folder, 5), Weights(version=3)
    noise = NoiseInjector.of(sender, NOISE)

    def digest(of: Any, weights: Weights = clean, dtype: torch.dtype = torch.float32, base: Path = folder) -> str:
        return sent_digest(of, content_hash(base), noise, weights, dtype)

    same = policy(folder, 5)
    for name, tensor in from_bytes(to_bytes(delivered(sender))).items():
        delivered(same)[name].data.copy_(tensor)
    assert digest(same) == digest(sender)
    others = [digest(sender, NOISY), digest(policy(folder, 6)), digest(policy(folder, 5, lora_alpha=16))]
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert digest(sender, base=copied) == digest(sender)
    tensors = load_file(copied / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1e-3
    save_file(tensors, copied / "model.safetensors")
    others += [digest(sender, dtype=torch.bfloat16), digest(sender, base=copied)]
    assert len({digest(sender), *others}) == 6
    version = Version("run", clean, digest(sender))
    with pytest.raises(PoolLost, match=r"its base, its adapter, its scale or its noise differs$"):
        require_sent(Drawn((), version, others[-1], 0.0), version)
    assert [list(weight.shape) for _, weight in outline(noise).held()] == [[64], [64]]
    assert all(weight.is_meta for _, weight in outline(noise).held())


@pytest.mark.parametrize(
    ("rollout", "training", "said"),
    [
        ({"engine": "vllm", "workers": 2, "piece_size": 4}, {}, None),
        ({"engine": "vllm", "piece_size": 4}, {}, "without workers engine fast alone draws in pieces"),
        ({"engine": "generate", "workers": 2}, {}, "workers draw with engine fast or vllm"),
        (
            {"engine": "vllm", "workers": 2},
            {"vllm_tensor_parallel_size": 2},
            "vllm_tensor_parallel_size 2: a worker has one device",
        ),
        ({"workers": 2}, {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32 true: workers hold the head as"),
        ({}, {"cast_lm_head_to_fp32": True}, None),
    ],
)
def test_what_workers_take(rollout, training, said):
    fields = {"vllm_tensor_parallel_size": 1, "cast_lm_head_to_fp32": False, **training}
    values: Any = SimpleNamespace(rollout=RolloutConfig(**rollout), training=SimpleNamespace(**fields))
    with nullcontext() if said is None else pytest.raises(UserError, match=said):
        check_workers(values)
