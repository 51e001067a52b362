"""Weights split by FSDP2 over two processes (gloo): what is written to a shard is what forwards use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import contextlib, datetime, json, pathlib, sys
import torch, torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from types import SimpleNamespace
from perl.adapters.delivery import delivered, to_bytes
from perl.adapters.rollout_merge import RolloutMerge
from perl.noise.injector import NoiseInjector
from perl.device.sharding import is_sharded, local, resharded, shard_of, whole
from perl.training.policy import Policy
from perl.training.pool import PoolEngine
from perl.engines.vllm_sync import merged_weights, save_adapter
from tests.tiny import tiny_model

kind, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
limit = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)


def make():
    model = get_peft_model(tiny_model(scale=4.0), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def shard(model):
    # `last`: what accelerate 1.15 does, the final norm and the head stay gathered after a forward; `all`: everything.
    inner = model.base_model.model
    for layer in inner.model.layers:
        fully_shard(layer, reshard_after_forward=kind != "all")
    fully_shard([inner.model.norm, inner.lm_head], reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=kind != "all")
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[7, 9, 11, 8, 20, 3]])).logits[0]


def state(model):
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


alone = make()
everywhere = ["norm"]  # final norm included
found = {}
with NoiseInjector(alone, everywhere, [], seed=1, relative=False).applied(0.5, (0, 0)):
    want = logits(alone)
clean = logits(alone)
assert (want - clean).abs().max() > 0.1
assert not is_sharded(alone)

model = shard(make())
assert is_sharded(model)
before = state(model)
assert torch.equal(logits(model), clean)  # some modules are gathered from here on
noise, merge = NoiseInjector(model, everywhere, [], seed=1, relative=False), RolloutMerge(model, True)
for _ in range(2):
    with noise.applied(0.5, (0, 0)), merge.applied():
        found["rollout"] = float((logits(model) - want).abs().max())
        found["merged"] = all(module.merged for module in model.modules() if hasattr(module, "lora_A"))
    # The first forward after it, then what the shards hold.
    found["loss"] = torch.equal(logits(model), clean)
    with resharded(model):
        after = state(model)
        found["every bit"] = all(torch.equal(after[name], before[name]) for name in before)
with resharded(model):
    weight = model.base_model.model.model.norm.weight
    full = torch.arange(64.0)
    assert torch.equal(shard_of(full, weight), full.chunk(2)[rank])
    assert local(weight).shape == (32,)
logits(model)
with torch.no_grad():
    for one in (alone, model):  # an optimizer step: written to the shards, alongside what is still gathered
        with resharded(one):
            for name, parameter in one.named_parameters():
                if "lora_" in name:
                    local(parameter).mul_(2)
for tensor in delivered(alone).values():
    tensor.data.mul_(2)
older, newer = (to_bytes(delivered(alone)), []), logits(model)
engine = SimpleNamespace(local=SimpleNamespace(model=model))
with PoolEngine._holding(engine, older):
    found["older"] = torch.equal(logits(model), logits(alone))
found["newer"] = torch.equal(logits(model), newer)
for tensor in delivered(alone).values():
    tensor.data.div_(2)
folder = pathlib.Path(store).parent
states = []
for one, name in ((alone, f"alone{rank}"), (model, f"model{rank}")):
    save_adapter(one, contextlib.nullcontext, folder / name)
    saved = load_file(folder / name / "adapter_model.safetensors")
    states.append((saved, dict(merged_weights(one, contextlib.nullcontext))))
    logits(one)
for name, alone_s, model_s in zip(("saved", "sent"), *states):
    found[name] = alone_s.keys() == model_s.keys() and all(torch.equal(alone_s[key], model_s[key]) for key in alone_s)
base = {name.removeprefix("base_model.model.").replace(".base_layer", "") for name in before if "lora_" not in name}
assert states[1][1].keys() == base
policy = Policy.__new__(Policy)
policy.trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model))
with NoiseInjector(alone, everywhere, [], seed=1, relative=False).applied(0.5, (0, 0)), alone.disable_adapter():
    want = logits(alone)
with noise.applied(0.5, (0, 0)), policy.without_adapter():
    found["without"] = torch.equal(logits(model), want)
model(input_ids=torch.tensor([[7, 9, 11]])).logits.sum().backward()
found["learns"] = all(each.grad is not None for name, each in model.named_parameters() if "lora_" in name)
print(json.dumps(found))
dist.barrier()  # a rank that leaves early can have gloo end the other one with "terminate called"
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["last", "all"])
def test_noise_and_merge_on_shards_are_used_by_the_rollout_and_gone_in_the_next_forward(kind, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, kind, str(rank), str(tmp_path / "store")],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    done = [rank.communicate(timeout=120) for rank in ranks]
    for rank, (output, errors) in zip(ranks, done, strict=True):
        assert rank.returncode == 0, errors[-3000:]
        found = json.loads(output.splitlines()[-1])
        assert found.pop("rollout") < 1e-4
        names = "merged", "loss", "every bit", "older", "newer", "saved", "sent", "without", "learns"
        assert found == dict.fromkeys(names, True)
