"""Rollouts by vLLM, real, their log-probabilities compared with the trainer's."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from perl.base.errors import RunError, UserError, say_once
from perl.config.schema import NoiseConfig, PeftConfig
from perl.engines import vllm_sync
from perl.engines.vllm import ENVIRONMENT
from perl.noise.injector import Target
from tests.tiny import save_tiny
from tests.trainers import make_trainer


def trained_by(folder: Path, **settings: Any) -> Any:
    """A trainer whose adapter moves fast."""
    settings = {"max_steps": 3, "learning_rate": 5e-2, "temperature": 0.6} | settings
    return make_trainer(folder, engine="vllm", use_vllm=True, **settings)


def mismatches(trainer: Any) -> list[float]:
    return [row["rollout/logp_mismatch"] for row in trainer.state.log_history if "rollout/logp_mismatch" in row]


def in_a_process(job: Any, *args: Any) -> Any:
    """vLLM keeps state in its process."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(job, *args).result(timeout=300)


def on_cpu() -> None:
    """Before vLLM is imported. Half of its start would go into compiling."""
    uncompiled = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    os.environ.update(ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"} | uncompiled)


@contextmanager
def logged():
    """The lines that perl logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("perl").addHandler(handler)
    logging.getLogger("perl").setLevel(logging.INFO)
    say_once.cache_clear()  # several trainings share the process
    yield lines
    logging.getLogger("perl").removeHandler(handler)


def until_stopped(trainer: Any) -> dict[str, Any]:
    """Trains; the error that stops it, and the metric of each step."""
    error = None
    try:
        trainer.train()
    except RunError as caught:
        error = str(caught)
    return {"error": error, "steps": trainer.state.global_step, "mismatch": mismatches(trainer)}


def until_step_3(trainer: Any, load: Any, *args: Any) -> None:
    """From the fourth rollout on vLLM is not given the policy."""
    if trainer.state.global_step < 3:
        load(*args)


def base_weights(trainer: Any) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}


def keeps_its_weights() -> None:
    """On a CPU vLLM packs weights and drops them, so that there is none to replace; on a GPU it keeps them, as here."""
    import torch
    from vllm.model_executor.layers import utils

    def in_place(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = in_place


def colocated(folder: Path, adapter: str = "lora") -> dict[str, Any]:
    """Three steps as they should be, and a fourth rollout before which vLLM is not given the policy (in a child).

    Returns what `until_stopped` does, and the log, vLLM's dtype, the names of the base's weights that have changed,
    and how many weights were sent."""
    on_cpu()
    import torch

    if adapter != "lora":
        keeps_its_weights()
    base = save_tiny(folder / "model", scale=4.0)
    settings = {"lr_scheduler_type": "constant", "max_steps": 4}  # so that a step's change is plain against rounding
    settings |= {"adapter": adapter, "peft": PeftConfig(type=adapter, r=4, lora_alpha=8)}
    sent = []
    with logged() as lines:
        model = AutoModelForCausalLM.from_pretrained(base)
        trainer = trained_by(folder, model=model, vllm_max_model_length=64, **settings)
        before, engine = base_weights(trainer), trainer.step.engine
        weights = vllm_sync.merged_weights

        def counted(*args):
            for name, tensor in weights(*args):
                sent.append(name)
                yield name, tensor

        vllm_sync.merged_weights = counted
        engine.sync.load = partial(until_step_3, trainer, engine.sync.load)
        dtype = str(engine.llm.llm_engine.model_config.dtype)
        found = until_stopped(trainer)
    changed = [name for name, p in base_weights(trainer).items() if not torch.equal(p, before[name])]
    return found | {"log": "\n".join(lines), "dtype": dtype, "changed": changed, "sent": len(sent)}


def require_agreement(found: dict[str, Any]) -> None:
    """The trainer is in float32 and vLLM, left to itself by TRL, in bfloat16: its rounding is no fault."""
    assert found["dtype"] == "torch.bfloat16"
    assert found["error"] is None
    assert "sampler and trainer agree" in found["log"]
    *current, stale = found["mismatch"]
    assert len(current) == 3
    assert 1e-3 < max(current) < 0.1
    assert stale > 2 * max(current)
    assert found["changed"] == []


@pytest.mark.vllm
@pytest.mark.slow
def test_colocated_vllm_is_given_the_adapter_alone_and_a_stale_one_shows(tmp_path):
    """With vllm-cpu as it is installed, which has packed the base's weights."""
    found = in_a_process(colocated, tmp_path)
    require_agreement(found)
    assert found["sent"] == 0
    assert "merged weights" not in found["log"]


@pytest.mark.vllm
@pytest.mark.slow
def test_what_vllm_does_not_serve_is_sent_merged_and_the_base_stays(tmp_path):
    found = in_a_process(colocated, tmp_path, "dora")
    require_agreement(found)
    assert found["sent"] > 0
    assert "vLLM is sent merged weights, not the adapter alone: vLLM does not serve DoRA" in found["log"]


def refused(folder: Path) -> str:
    """What a run ends with whose adapter vLLM refuses, having been told of rank 8 (in a child)."""
    on_cpu()
    vllm_sync.max_lora_rank = lambda config: 8
    model = AutoModelForCausalLM.from_pretrained(save_tiny(folder / "model"))
    settings = {"peft": PeftConfig(r=16, lora_alpha=32), "vllm_max_model_length": 64}
    trainer = trained_by(folder, model=model, **settings)
    try:
        trainer.train()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.vllm
@pytest.mark.slow
def test_an_adapter_that_vllm_refuses_is_one_line(tmp_path):
    assert in_a_process(refused, tmp_path) == (
        "--config.rollout.engine vllm: vLLM refuses the adapter: LoRA rank 16 is greater than max_lora_rank 8.; use"
        " --config.rollout.engine fast"
    )


def of_two_seeds(folder: Path) -> list[dict[str, Any]]:
    """The first rollout of two seeds, and of the first again, and the random state of the trainer's process behind the
    engine's start (in a child)."""
    on_cpu()
    import torch

    base = save_tiny(folder / "model", scale=4.0)
    runs = []
    for seed in (1, 2, 1):
        drawn: list[list[int]] = []

        def collect(completion_ids: list[list[int]], drawn: list[list[int]] = drawn, **kwargs: Any) -> list[float]:
            drawn += completion_ids
            return [float(len(ids)) for ids in completion_ids]

        settings = {"max_steps": 1, "temperature": 1.0, "vllm_max_model_length": 64, "rewards": [collect]}
        model = AutoModelForCausalLM.from_pretrained(base)
        trainer = trained_by(folder, model=model, seed=seed, shuffle_dataset=False, **settings)
        states = [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]
        trainer.train()
        runs.append({"drawn": drawn, "states": states})
    return runs


@pytest.mark.vllm
@pytest.mark.slow
def test_the_runs_seed_reaches_vllm_and_the_engine_leaves_the_trainers_random_state(tmp_path):
    first, second, again = in_a_process(of_two_seeds, tmp_path)
    assert len(first["drawn"]) == 8
    assert first["drawn"] == again["drawn"] != second["drawn"]
    assert first["states"] == again["states"]
    assert all(one != other for one, other in zip(first["states"], second["states"], strict=True))


def weights_of(llm: Any) -> dict[str, Any]:
    ((names, weights),) = llm.apply_model(lambda model: list(zip(*model.named_parameters(), strict=True)))
    return {name: weight.detach().clone() for name, weight in zip(names, weights, strict=True) if "lora" not in name}


def noisy(folder: Path) -> dict[str, Any]:
    """Three rollouts under noise, and a fourth in which it is withheld from vLLM (in a child). The trainer computes the
    log-probabilities of all of them under the noise.

    Returns what `until_stopped` does, the log, the names of the engine's weights that changed while it sampled, those
    that were not as before afterwards, the realized sigma, and what vLLM says of a layer that it has not."""
    on_cpu()
    import torch

    base = save_tiny(folder / "model", scale=4.0)
    noise = NoiseConfig(enabled=True, seed=3, sigma_start=1.0, sigma_end=1.0, old_logps="noisy")
    settings = {"lr_scheduler_type": "constant", "max_steps": 4}
    with logged() as lines:
        model = AutoModelForCausalLM.from_pretrained(base)
        trainer = trained_by(folder, model=model, noise=noise, vllm_max_model_length=64, **settings)
        llm, in_engine = trainer.step.engine.llm, trainer.step.engine.noise
        before, applied, changed = weights_of(llm), in_engine.applied, set()

        @contextmanager
        def watched(sigma, draw):
            with applied(sigma if trainer.state.global_step < 3 else 0.0, draw):
                changed.update(name for name, p in weights_of(llm).items() if not torch.equal(p, before[name]))
                yield

        in_engine.applied = watched
        found = until_stopped(trainer)
    left = [name for name, p in weights_of(llm).items() if not torch.equal(p, before[name])]
    realized = [row["aqn/sigma_realized"] for row in trainer.state.log_history if "aqn/sigma_realized" in row]
    odd = nn.LayerNorm(32)
    elsewhere = Target("base_model.model.model.layers.9.norm", odd), Target("base_model.model.model.norm", odd)
    refused = []
    for target in elsewhere:
        trainer.noise.targets = [target]
        try:
            vllm_sync.noise_of_engine(llm, trainer.noise)
        except UserError as error:
            refused.append(str(error))
    return found | {
        "log": "\n".join(lines),
        "changed": sorted(changed),
        "left": left,
        "realized": realized,
        "refused": refused,
    }


@pytest.mark.vllm
@pytest.mark.slow
def test_the_noise_reaches_vllms_norms_and_leaves_them_bit_for_bit(tmp_path):
    found = in_a_process(noisy, tmp_path)
    assert found["error"] is None
    assert "sampler and trainer agree" in found["log"]
    *current, withheld = found["mismatch"]
    assert len(current) == 3
    assert max(current) < 0.1  # bfloat16's rounding
    assert withheld > 3 * max(current)
    assert found["changed"] == [f"model.layers.{i}.post_attention_layernorm.weight" for i in range(2)]
    assert found["left"] == []
    assert found["realized"] == [pytest.approx(1.0, rel=0.25)] * 3 + [0.0]
    missing, odd = found["refused"]
    assert "model.layers.9.norm is [32] in the trainer, but vLLM has no such layer" in missing
    assert "model.norm is [32] in the trainer, but vLLM has it as bfloat16 [64]" in odd
