"""The policy that samples: the adapter merged into the weights, proved, and measured against the trainer's."""

import json
import logging
import math

import pytest
import torch

from perl.adapters.layers import AdaptedLayer, adapted_layers
from perl.errors import RankError
from perl.training.callbacks import MetricsWriter
from perl.training.mismatch import Mismatch, importance_ratio
from perl.training.proof import Evidence, require_same_policy, rows_of_lists
from tests.training.test_trainer import adapter_state, guide_noise, make_trainer


def metrics(folder, name):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_rollouts_with_the_adapter_merged_teach_what_those_with_it_unmerged_do(tmp_path, engine):
    """Three steps with noise: the same tokens, so the same adapter up to rounding; the base stays bit for bit."""
    adapters = {}
    for merge in (True, False):
        writer = MetricsWriter(tmp_path / "metrics.jsonl")
        settings = {"noise": guide_noise(), "max_steps": 3, "callbacks": [writer], "rollout": {"merge_adapter": merge}}
        trainer = make_trainer(tmp_path, engine=engine, **settings)
        base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
        seen = []
        complete = trainer.behaviour._complete

        def spy(*args, complete=complete, trainer=trainer, seen=seen, **kwargs):
            seen.append(trainer.behaviour.merge.merged)
            return complete(*args, **kwargs)

        trainer.behaviour._complete = spy
        trainer.train()
        assert seen == [merge] * 3
        assert all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if n in base)
        assert not any(adapted.layer.merged for adapted in adapted_layers(trainer.model))
        adapters[merge] = adapter_state(trainer)
    moved = {name: tensor for name, tensor in adapters[True].items() if "lora_B" in name}
    assert all(tensor.abs().max() > 1e-3 for tensor in moved.values())
    for name, tensor in adapters[True].items():
        assert torch.allclose(tensor, adapters[False][name], atol=1e-5), name
    assert (
        metrics(tmp_path, "rollout/merge_rounding_error") == [0.0] * 3
    )  # float32 rounds nothing away; False: no entry


def in_bfloat16(trainer):
    """The base in bfloat16 and the adapter in float32, as on an accelerator."""
    for parameter in trainer.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return trainer


def trained_by(folder, *, steps=3, dtype="float32", **settings):
    """A trainer whose every rollout is proved, and whose adapter moves fast."""
    settings["rollout"] = {"verify_steps": 1, "merge_adapter": True} | settings.get("rollout", {})
    trainer = make_trainer(folder, max_steps=steps, learning_rate=5e-2, **({"engine": "fast"} | settings))
    return in_bfloat16(trainer) if dtype == "bfloat16" else trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_a_clean_run_is_proved_at_every_rollout(tmp_path, engine, dtype, caplog):
    trainer = trained_by(tmp_path, engine=engine, dtype=dtype, noise=guide_noise())
    proved = []
    prove = trainer.behaviour.prove
    trainer.behaviour.prove = lambda rollout, *args, **kwargs: prove(rollout, *args, **kwargs) or proved.append(rollout)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert [rollout.step for rollout in proved] == [0, 1, 2]
    assert sum("proved to be the trained policy's" in record.message for record in caplog.records) == 1


def test_proofs_come_at_the_first_rollout_and_every_so_many_steps(tmp_path):
    for every, steps in ((2, [0, 2, 4]), (0, [0])):
        trainer = trained_by(tmp_path, steps=5, rollout={"verify_steps": every})
        proved = []
        prove = trainer.behaviour.prove
        trainer.behaviour.prove = lambda r, *args, prove=prove, proved=proved: prove(r, *args) or proved.append(r.step)
        trainer.train()
        assert proved == steps


def test_a_layer_that_is_not_merged_stops_the_run(tmp_path, monkeypatch):
    """Its merged weight is the base's: unsloth's bug 8701 in one layer."""
    trainer = trained_by(tmp_path)
    skipped = trainer.behaviour.merge.layers[9]
    merged = AdaptedLayer.merged

    def skips(adapted):
        return adapted.weights() if adapted == skipped else merged(adapted)

    monkeypatch.setattr(AdaptedLayer, "merged", skips)
    with pytest.raises(RankError, match="does not run the policy that is trained"):
        trainer.train()
    assert trainer.state.global_step == 1  # at step 0 there is nothing to miss


def test_weights_of_the_step_before_stop_the_run(tmp_path, monkeypatch):
    trainer = trained_by(tmp_path)
    merged, before = AdaptedLayer.merged, {}

    def stale(adapted):
        step = trainer.state.global_step
        before[adapted.name, step] = merged(adapted)
        return before.get((adapted.name, step - 1), before[adapted.name, step])

    monkeypatch.setattr(AdaptedLayer, "merged", stale)
    with pytest.raises(RankError, match="missed the adapter"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_an_adapter_that_is_off_while_sampling_stops_the_run(tmp_path):
    trainer = trained_by(tmp_path, rollout={"merge_adapter": False})
    complete = trainer.behaviour._complete

    def without(*args, **kwargs):
        with trainer.model.disable_adapter():
            return complete(*args, **kwargs)

    trainer.behaviour._complete = without
    with pytest.raises(RankError, match=r"the sampler missed the adapter: over [0-9]+ drawn tokens"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_another_models_log_probabilities_stop_the_run(tmp_path):
    """Sampled without the noise that the trainer believes in."""
    trainer = trained_by(tmp_path, noise=guide_noise())
    complete = trainer.behaviour._complete

    def clean(*args, **kwargs):
        norms = [target.weight for target in trainer.noise.targets]
        noisy = [norm.detach().clone() for norm in norms]
        for norm in norms:
            norm.data.fill_(1.0)
        try:
            return complete(*args, **kwargs)
        finally:
            for norm, bits in zip(norms, noisy, strict=True):
                norm.data.copy_(bits)

    trainer.behaviour._complete = clean
    with pytest.raises(RankError, match="does not run the policy that is trained"):
        trainer.train()


def evidence(**changes):
    base = torch.tensor([-1.0, -2.0, -3.0])
    given = {"sampler": base + 0.5, "adapted": base + 0.5, "base": base, "itemsize": 4, "largest_b": 0.1}
    return Evidence(**(given | changes))


def test_evidence_is_judged():
    base = torch.tensor([-1.0, -2.0, -3.0])
    require_same_policy(evidence())
    require_same_policy(evidence(sampler=torch.tensor([]), adapted=torch.tensor([]), base=torch.tensor([])))
    with pytest.raises(RankError, match="missed the adapter"):
        require_same_policy(evidence(sampler=base))
    with pytest.raises(RankError, match="changes no log-probability"):
        require_same_policy(evidence(adapted=base, sampler=base))
    require_same_policy(evidence(adapted=base, sampler=base, largest_b=0.0))  # an adapter at its start
    off = base + 0.5 + torch.tensor([0.05, -0.05, 0.05])
    require_same_policy(evidence(sampler=off, itemsize=2))
    with pytest.raises(RankError, match="does not run the policy"):
        require_same_policy(evidence(sampler=off))
    require_same_policy(evidence(sampler=off, share_lost=0.1))  # 0.05 of an effect of 0.5, where twice 0.1 may go
    require_same_policy(evidence(sampler=off, comparable=False))
    unknown = torch.tensor([0.0, math.nan, 0.0])  # a token for which vLLM has no number does not count
    require_same_policy(evidence(sampler=base + 0.5 + unknown))
    with pytest.raises(RankError, match="missed the adapter"):
        require_same_policy(evidence(sampler=base + unknown))
    with pytest.raises(RankError, match="are nan from the trainer's"):
        require_same_policy(evidence(sampler=base * math.nan))


def test_rows_of_lists_are_those_of_padded_tensors():
    """Completions may end without an end-of-sequence token, at the longest that vLLM takes."""
    rows = rows_of_lists([[5, 6, 7], [8]] + [[9]] * 4, [[3], [4, 2]] + [[1]] * 4, torch.device("cpu"))
    assert rows.input_ids[:2].tolist() == [[5, 6, 7, 3, 0], [0, 0, 8, 4, 2]]
    assert rows.attention_mask[:2].tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert rows.drawn.tolist() == [[True, False], [True, True], [True, False], [True, False]]
    numbers = rows.of_lists([[-1.0], [-2.0, None], [-3.0], [-4.0], [-5.0], [-6.0]])
    assert numbers.nan_to_num(nan=9.0).tolist() == [-1.0, -2.0, 9.0, -3.0, -4.0]


def test_mismatch_and_kl_by_hand():
    mismatch = Mismatch()
    mismatch.add(torch.tensor([[0.0, -1.0]]), torch.tensor([[-0.5, -1.0]]), torch.tensor([[1, 1]]))
    mismatch.add(torch.tensor([[-2.0, 7.0]]), torch.tensor([[-1.5, float("nan")]]), torch.tensor([[1, 1]]))
    mismatch.add(torch.tensor([[-2.0]]), torch.tensor([[-9.0]]), torch.tensor([[0]]))
    metrics = mismatch.take(lambda sums: sums, torch.device("cpu"))
    k3 = (math.exp(0.5) - 1 - 0.5) + (math.exp(-0.5) - 1 + 0.5)
    assert metrics == pytest.approx({"rollout/logp_mismatch": 1 / 3, "rollout/logp_kl": k3 / 3})
    assert mismatch.take(lambda sums: sums, torch.device("cpu")) == {}


def test_importance_ratio_by_hand():
    trainer = torch.log(torch.tensor([[0.5, 0.2, 0.9]]))
    sampler = torch.log(torch.tensor([[0.25, 0.4, 0.1]]))
    mask = torch.tensor([[1, 1, 0]])
    assert importance_ratio(trainer, sampler, mask, "token", None, 3.0).tolist() == [pytest.approx([2.0, 0.5, 1.0])]
    assert importance_ratio(trainer, sampler, mask, "token", 0.8, 1.5).tolist() == [pytest.approx([1.5, 0.8, 1.0])]
    assert importance_ratio(trainer, sampler, mask, "sequence", None, 3.0).tolist() == [pytest.approx([1.0])]


def test_the_mismatch_is_rounding_without_noise_and_more_with_it(tmp_path):
    for name, noise in (("clean", None), ("noisy", guide_noise()), ("old", guide_noise(old_logps="noisy"))):
        (tmp_path / name).mkdir()
        writer = MetricsWriter(tmp_path / name / "metrics.jsonl")
        trained_by(tmp_path / name, noise=noise, callbacks=[writer]).train()
    found = {name: metrics(tmp_path / name, "rollout/logp_mismatch") for name in ("clean", "noisy", "old")}
    assert [len(values) for values in found.values()] == [3, 3, 3]
    assert max(found["clean"] + found["old"]) < 1e-4  # against the noisy policy, the noise is on both sides
    assert min(found["noisy"]) > 1e-2
    assert min(metrics(tmp_path / "noisy", "rollout/logp_kl")) > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_correction_weights_the_loss(tmp_path, level):
    """One step on the same samples: a bound of 1/2 below and above halves the gradient of plain SGD exactly."""
    moved = {}
    for name, rollout, bounds in (
        ("none", {}, {}),
        ("half", {"importance_correction": level}, {"clip_min": 0.49999999, "clip_max": 0.5}),
        ("one", {"importance_correction": level}, {"clip_max": 3.0}),
    ):
        extra = {f"vllm_importance_sampling_{key}": value for key, value in bounds.items()}
        plain = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = trained_by(tmp_path / name, steps=1, rollout=rollout, **plain, **extra)
        before = adapter_state(trainer)
        trainer.train()
        assert trainer.use_vllm is False
        moved[name] = torch.cat([(t - before[n]).flatten() for n, t in adapter_state(trainer).items()])
    assert moved["none"].abs().max() > 1e-4
    assert torch.allclose(moved["half"], moved["none"] / 2, atol=1e-7)
    assert torch.allclose(moved["one"], moved["none"], atol=1e-7)  # the sampler is the policy: all ratios are 1
