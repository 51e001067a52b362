"""The copy of the clean weights that an accelerator's rollouts return from."""

import pytest

pytestmark = pytest.mark.npu

PROGRAM = """
from perl.adapters.rollout_merge import RolloutMerge
from tests.adapters.test_rollout_merge import make

model = make(dtype=torch.bfloat16, std=0.5).to("npu")
weights = {n: p for n, p in model.named_parameters() if n.endswith("base_layer.weight")}
clean = {n: p.detach().clone() for n, p in weights.items()}
merge = RolloutMerge(model, True)


def rollout():
    with merge.applied():
        changed = all(not torch.equal(p, clean[n]) for n, p in weights.items())
        kept = {n: (k.copy.data_ptr(), k.copy.is_pinned(), k.copy.device.type) for n, k in merge._kept.items()}
    return changed, all(torch.equal(p, clean[n]) for n, p in weights.items()), kept


first, second = rollout(), rollout()
answer = {"changed": [first[0], second[0]], "back": [first[1], second[1]], "same": first[2] == second[2]}
answer["pinned"] = {pinned for _, pinned, _ in first[2].values()} == {True}
# What is written into a copy stays there as long as the copy is not made again.
name = "model.layers.0.self_attn.q_proj.weight"
parameter = weights["base_model.model." + name.replace("weight", "base_layer.weight")]
merge._kept[name].copy.zero_()
rollout()
answer["copied again"] = bool(parameter.any())
with torch.no_grad():
    parameter.fill_(2.0)
clean = {n: p.detach().clone() for n, p in weights.items()}
answer["back after a write"] = rollout()[1]
"""


def test_the_copy_is_pinned_made_once_and_made_again_after_a_write(answer):
    assert answer(PROGRAM, devices=1) == {
        "changed": [True, True],
        "back": [True, True],
        "same": True,
        "pinned": True,
        "copied again": False,
        "back after a write": True,
    }
