"""Every PEFT method: what it reads, starts from, trains and saves, and how AdaLoRA's ranks fall."""

import json
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from peft.tuners.lora.config import KasaConfig
from transformers import AutoModelForCausalLM

from perl.adapters import ADAPTERS
from perl.adapters.adalora import RankSchedule, target_rank
from perl.adapters.applied import applied
from perl.adapters.checks import check_layers, check_method, strategy_of
from perl.adapters.merge import merge_adapter
from perl.base.errors import UserError
from perl.config.load import parse
from perl.config.peft_fields import READS, reads_of
from perl.config.schema import NoiseConfig, PeftConfig
from perl.engines.vllm import cannot_serve
from perl.models.folders import require_adapter
from perl.noise.injector import NoiseInjector
from perl.runs.adapter_trainer import AllocateRanks
from perl.tools.plan.inputs import shape_of
from tests.tiny import save_tiny, tiny_model
from tests.trainers import make_trainer, move_adapter, reward_tokens

pytestmark = pytest.mark.numeric

METHODS = [name for name in ADAPTERS if name != "none"]
LIKE_LORA = ("rslora", "lora_plus", "dora", "milora")
"""Trained by other tests too, or as another method."""
TOKENS = torch.arange(6, 22).reshape(1, 16)
TRAINING: Any = SimpleNamespace(weight_decay=0.0, optim="adamw_torch", max_steps=20, deepspeed_plugin=None)


def changed(**fields: Any) -> Any:
    return SimpleNamespace(**vars(TRAINING) | fields)


def settings(name, **fields):
    """The group `peft` of a tiny run: rank 4 where the method has one, blocks of 8 for OFT."""
    own: dict[str, Any] = {"r": 4, "lora_alpha": 8, "oft_block_size": 8, "adalora_target_r": 2}
    return PeftConfig(type=name, **{k: v for k, v in own.items() if k in reads_of(name)}, **fields)


def wrapped(name, model=None, **fields):
    torch.manual_seed(0)
    config = settings(name, **fields)
    adapter: Any = ADAPTERS[name]
    model = get_peft_model(model or tiny_model(scale=4.0), adapter.build(config))
    if adapter.start is not None:
        adapter.start(model, config, lambda parameters: torch.no_grad())
    return model, config


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits[0]


def from_disk(folder, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return logits(model if adapter is None else PeftModel.from_pretrained(model, str(adapter)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base"), scale=4.0, layers=1)


@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.slow] * (m in LIKE_LORA)) for m in METHODS])
def test_trains_what_it_says_and_the_saved_adapter_merges_into_the_original_base(base, tmp_path, name, caplog):
    """20 steps with AQN, the adapter merged while sampling: nothing else has moved, and plain PEFT, on the original
    base, computes what was trained."""
    caplog.set_level(logging.INFO, "perl")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    noise = NoiseConfig(enabled=True, seed=3, sigma_start=0.05, sigma_end=0.01, num_stages=2)
    trainer = make_trainer(
        tmp_path, model=model, adapter=name, peft=settings(name), noise=noise, engine="fast", rewards=(reward_tokens,),
        max_steps=20, max_completion_length=4, gradient_accumulation_steps=1, logging_steps=20,
        gradient_checkpointing=True,
    )  # fmt: skip
    policy = trainer.model
    before = {key: p.detach().clone() for key, p in policy.named_parameters()}
    names = {key for key, p in policy.named_parameters() if p.requires_grad}
    trainer.train()
    moved = {key for key, p in policy.named_parameters() if not torch.equal(p, before[key])}
    assert moved == names or (name == "adalora" and moved < names)  # where a layer has lost all its ranks
    assert trainer.applied.tensors.keys() == set(ADAPTERS[name].trains)
    assert "sampler and trainer agree" in caplog.text
    assert "the adapter is merged into the weights" in caplog.text
    computed = logits(policy)
    trainer.save_model(str(tmp_path / "adapter"))
    assert (from_disk(base, tmp_path / "adapter") - computed).abs().max() < 1e-4
    report = merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert (from_disk(tmp_path / "merged") - computed).abs().max() < 1e-4
    assert report.effect > 1e-3
    shaped = name in ("lora", "rslora", "lora_plus", "lora_fa", "pissa", "milora", "milora_plus")
    assert (cannot_serve(json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())) is None) == shaped


@pytest.mark.parametrize("name", METHODS)
def test_starts_as_the_base_and_computes_in_bfloat16(name):
    base = tiny_model(scale=4.0)
    expected = logits(base)
    model, config = wrapped(name, base)
    assert (logits(model) - expected).abs().max() < 1e-4
    found = applied(model, ADAPTERS[name], config)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.trained == trainable * ADAPTERS[name].trained_share
    assert found.parameters == sum(p.numel() for p in tiny_model().parameters())
    assert shape_of(base.config, config).adapter == trainable  # what `plan` counts
    half, _ = wrapped(name, tiny_model(scale=4.0, dtype=torch.bfloat16))
    assert {p.dtype for p in half.parameters() if p.requires_grad} == {torch.float32}
    half.train()(input_ids=TOKENS).logits.float().square().sum().backward()
    gradients = [p.grad for p in half.parameters() if p.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_every_method_reads_fields_that_there_are():
    assert READS.keys() <= ADAPTERS.keys()
    for name in ADAPTERS:
        assert set(reads_of(name)) <= set(PeftConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"type": "miss", "lora_alpha": 16},
            "lora_alpha 16: peft.type miss does not read it; it reads r, lora_dropout",
        ),
        ({"type": "ln_tuning", "r": 8}, "r 8: peft.type ln_tuning does not read it; it reads target_modules"),
        ({"type": "none", "r": 8}, "it reads no other field of the group; leave it out .its default is 16"),
        ({"type": "pissa", "lora_dropout": 0.1}, "lora_dropout 0.1: peft.type pissa does not read it"),
        ({"type": "vera", "exclude_modules": ["o_proj"]}, "exclude_modules .'o_proj'.: peft.type vera"),
        ({"type": "lora", "oft_block_size": 8}, "oft_block_size 8: peft.type lora does not read it"),
        ({"type": "hra", "r": 3}, "r 3: hra starts from pairs .* write an even number, 4"),
        ({"type": "adalora", "adalora_target_r": 16}, "adalora_target_r 16: the ranks fall from --config.peft.r 16"),
        ({"type": "adalora", "adalora_tinit": 12, "adalora_tfinal": 8}, "no step is left between them .* of 20"),
        ({"exclude_modules": "(["}, r"exclude_modules \(\[: no regular expression: unterminated"),
        ({"type": "galore"}, "galore"),
    ],
)
def test_a_field_that_a_method_does_not_read_or_take_is_one_line(fields, said):
    with pytest.raises(UserError, match=said):
        check_method(PeftConfig(**fields), TRAINING, "")


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("ln_tuning", {"target_modules": ["q_proj"]}, r"model\.layers\.0\.self_attn\.q_proj is no norm"),
    ],
)
def test_what_peft_would_take_otherwise_than_it_was_asked_is_refused(name, fields, said):
    config = PeftConfig(type=name, **fields)
    adapter: Any = ADAPTERS[name]
    model = get_peft_model(tiny_model(), adapter.build(config))
    with pytest.raises(UserError, match=said):
        adapter.start(model, config, lambda parameters: torch.no_grad())


def test_a_run_without_mistakes_is_checked_in_silence():
    for name in ADAPTERS:
        check_method(settings(name), TRAINING, "")
    assert target_rank(PeftConfig(type="adalora", r=12)) == 8


@pytest.mark.parametrize("name", ["lora_fa", "pissa", "milora", "adalora", "hra"])
def test_what_fsdp2_would_train_wrongly_is_refused(monkeypatch, name):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=f"peft.type {name}: can't be trained with FSDP2: .*; start with DDP or ZeRO-2"):
        check_method(settings(name), TRAINING, strategy_of(TRAINING))


def test_an_optimizer_that_moves_what_has_no_gradient_is_refused_for_pissa():
    with pytest.raises(UserError, match=r"weight_decay 0.1: would change the half .* write 0"):
        check_method(settings("pissa"), changed(weight_decay=0.1), "")
    with pytest.raises(UserError, match=r"optim muon: peft.type milora needs .* write adamw_torch"):
        check_method(settings("milora"), changed(optim="muon"), "")


def test_an_adapter_of_any_method_is_merged_but_only_lora_is_trained_further(tmp_path):
    model, _ = wrapped("ia3")
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is of method IA3, which is not trained further; write --config.peft.adapter"):
        parse(["--config.peft.adapter", str(tmp_path)])
    words = ["--config.peft.adapter", str(tmp_path), "--config.peft.adapter_mode", "merge", "--config.peft.type", "oft"]
    assert parse(words).values.peft.type == "oft"


@pytest.mark.parametrize(
    ("name", "value"),
    [("modules_to_save", ["lm_head"]), ("bias", "lora_only"), ("trainable_token_indices", [3, 4])],
)
def test_an_adapter_that_trains_more_than_its_matrices_is_merged_and_not_trained_further(name, value, tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], **{name: value}))
    model.save_pretrained(tmp_path)
    told = rf"trains more than LoRA's matrices \({name} .*, and is not trained further; write .*_mode merge"
    with pytest.raises(UserError, match=told):
        parse(["--config.peft.adapter", str(tmp_path)])
    words = ["--config.peft.adapter", str(tmp_path), "--config.peft.adapter_mode", "merge"]
    assert parse(words).values.peft.adapter_mode == "merge"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora"),
        ({"kasa_config": KasaConfig()}, "kasa_config"),
    ],
)
def test_an_adapter_for_which_peft_changes_the_base_is_merged_alone(fields, told, tmp_path):
    """W - s B0 A0 + s B A, where a LoRA on the base is W + s B A."""
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], **fields))
    model.save_pretrained(tmp_path)
    assert f"with {told} PEFT changes its weights" in (cannot_serve(require_adapter(tmp_path)) or "")
    words = ["--config.peft.adapter", str(tmp_path)]
    with pytest.raises(UserError, match=rf"with {told} PEFT changes .*; write .*_mode merge"):
        parse(words)
    assert parse([*words, "--config.peft.adapter_mode", "merge"]).values.peft.adapter_mode == "merge"


def test_vllm_is_given_plain_lora_alone():
    plain = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="gaussian").to_dict()
    assert cannot_serve(plain) is None
    for field in ("lora_bias", "use_qalora", "alora_invocation_tokens", "velora_config", "arrow_config"):
        assert cannot_serve(plain | {field: [7]}) == f"vLLM serves plain LoRA only, without {field}"


def test_lora_is_trained_further_as_lora_fa_if_asked(tmp_path):
    model, _ = wrapped("pissa")
    model.save_pretrained(tmp_path)
    words = ["--config.peft.adapter", str(tmp_path)]
    assert (parse(words).values.peft.type, parse(words).values.peft.r) == ("lora", 8)
    assert parse([*words, "--config.peft.type", "lora_fa"]).values.peft.type == "lora_fa"
    with pytest.raises(UserError, match=r"type pissa: the adapter in .* has type lora"):
        parse([*words, "--config.peft.type", "pissa"])


def test_a_critic_computes_with_norms_of_its_own():
    with pytest.raises(UserError, match=r"peft.type ln_tuning: the critic of algorithm ppo would compute with the"):
        parse(["--config.algorithm.name", "ppo", "--config.peft.type", "ln_tuning"])


def test_something_else_that_is_trainable_is_found():
    model, config = wrapped("lora")
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight is trainable, and the method trains lora_A, lora_B"):
        applied(model, ADAPTERS["lora"], config)
    half, config = wrapped("lora_fa")
    with pytest.raises(RuntimeError, match="should train lora_A, lora_B, but lora_B is trainable"):
        applied(half, ADAPTERS["lora"], config)


def test_a_base_that_is_quantised_is_told():
    model, config = wrapped("lora")
    assert applied(model, ADAPTERS["lora"], config).quantised == ""
    fields = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model.get_base_model().config.quantization_config = fields
    found = applied(model, ADAPTERS["lora"], config)
    assert found.quantised == "4 bits (bitsandbytes, nf4)"
    assert found.line().endswith("; above a base in 4 bits (bitsandbytes, nf4)")


@pytest.mark.parametrize("name", ["pissa", "milora"])
def test_pissa_and_milora_start_from_the_components_that_they_are_named_for(name):
    """[B, -B0] [A; A0] with B = B0, A = A0: s B0 A0 is the base's weight in those components alone, and the base is
    not changed; the second half has no gradient."""
    base = tiny_model(scale=4.0)
    own = base.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():  # a spectrum that falls: the iteration that finds the largest values is not exact
        u, s, vt = torch.linalg.svd(own)
        s = torch.cat([torch.tensor([80.0, 70.0, 60.0, 50.0]), torch.linspace(1.0, 0.1, 60)])
        own.copy_(u * s @ vt)
    weight = own.detach().clone()
    model, _ = wrapped(name, base, target_modules=["q_proj"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert torch.equal(layer.base_layer.weight, weight)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (a.shape, b.shape, layer.scaling["default"]) == ((8, 64), (64, 8), 2.0)
    u, s, vt = torch.linalg.svd(weight)
    chosen = slice(0, 4) if name == "pissa" else slice(60, 64)
    torch.testing.assert_close(2 * b[:, :4] @ a[:4], u[:, chosen] * s[chosen] @ vt[chosen], rtol=0, atol=1e-3)
    assert torch.equal(a[:4], a[4:])
    assert torch.equal(b[:, :4], -b[:, 4:])
    model.train()(input_ids=TOKENS).logits.square().sum().backward()
    assert a.grad[:4].abs().min() > 0
    assert b.grad[:, :4].abs().min() > 0
    assert not a.grad[4:].any()
    assert not b.grad[:, 4:].any()


def test_milora_plus_looks_along_the_minor_directions_and_changes_nothing_yet():
    base = tiny_model(scale=4.0)
    model, _ = wrapped("milora_plus", base, target_modules=["q_proj"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(a @ a.T, torch.eye(4), rtol=0, atol=1e-5)
    smallest = torch.linalg.svdvals(layer.base_layer.weight.detach())[-4:]
    torch.testing.assert_close((layer.base_layer.weight @ a.T).norm(dim=0), smallest, rtol=1e-3, atol=1e-5)
    assert not b.any()


def test_pissa_wants_no_more_components_than_a_layer_has():
    config = PeftConfig(type="pissa", r=65, target_modules=["q_proj"])
    adapter: Any = ADAPTERS["pissa"]
    model = get_peft_model(tiny_model(), adapter.build(config))
    with pytest.raises(UserError, match=r"r 65: model.layers.0.self_attn.q_proj is \[64, 64\] and has 64 singular"):
        adapter.start(model, config, lambda parameters: torch.no_grad())


def test_lora_plus_gives_b_of_an_embedding_too_its_own_learning_rate():
    model, config = wrapped("lora_plus", target_modules=["q_proj", "embed_tokens"], lora_plus_lr_ratio=8.0)
    adapter: Any = ADAPTERS["lora_plus"]
    optimizer = adapter.optimizer(model, config, torch.optim.AdamW, {"lr": 1e-3})
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    assert {name: rate for name, rate in found.items() if "embed" in name} == {
        "base_model.model.model.embed_tokens.lora_embedding_A.default": (1e-3, 0.0),
        "base_model.model.model.embed_tokens.lora_embedding_B.default": (8e-3, 0.0),
    }
    assert {rate for name, rate in found.items() if "lora_B" in name} == {(8e-3, 0.0)}


def test_ia3_scales_the_input_of_a_feed_forward_layer_however_it_is_named():
    for targets in (["k_proj", "down_proj"], ["self_attn.k_proj", "mlp.down_proj"], r".*\.(k_proj|down_proj)"):
        model, _ = wrapped("ia3", tiny_model(intermediate_size=96), target_modules=targets)
        layer = model.get_base_model().model.layers[0]
        assert layer.mlp.down_proj.ia3_l["default"].shape == (1, 96)
        assert layer.self_attn.k_proj.ia3_l["default"].shape == (64, 1)


def test_lora_fa_steps_as_pefts_own_optimizer():
    """Which rounds the projected gradient to bfloat16: 2^-9 of a step, that Adam's first step hides."""

    def step(model, make):
        optimizer = make(model)
        model.train()(input_ids=TOKENS).logits.square().sum().backward()
        optimizer.step()
        return {k: p.detach() for k, p in model.named_parameters() if "lora_B" in k}

    mine, config = wrapped("lora_fa")
    theirs, _ = wrapped("lora")
    gradients = {}
    for key, parameter in mine.named_parameters():
        if "lora_B" in key:
            parameter.register_hook(lambda gradient, key=key: gradients.setdefault(key, gradient.clone()))
    after = step(mine, lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=1e-3, eps=1e-6))
    peft = step(theirs, lambda m: create_lorafa_optimizer(m, config.r, config.lora_alpha, lr=1e-3))
    for key, b in after.items():
        large = gradients[key].abs() > 0.05 * gradients[key].abs().max()
        torch.testing.assert_close(b[large], peft[key][large], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(("name", "further"), [("lora_fa", False), ("lora_fa", True), ("pissa", False)])
def test_a_pass_of_the_reference_policy_trains_nothing_more(tmp_path, name, further):
    """PEFT switches the adapter off, or to the reference's copy of one that is trained further, and on again."""

    def learn(folder, beta):
        torch.manual_seed(0)
        model = tiny_model(scale=4.0)
        if further:
            model = get_peft_model(model, ADAPTERS["lora"].build(settings("lora")))  # type: ignore[arg-type]
            move_adapter(model, 0.1)
        trainer = make_trainer(
            tmp_path / folder, model=model, adapter=name, peft=settings(name), beta=beta, max_steps=3,
            rewards=(reward_tokens,), max_completion_length=4, gradient_accumulation_steps=1,
        )  # fmt: skip
        before = {key: p.detach().clone() for key, p in trainer.model.named_parameters()}
        names = {key for key, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        assert {key for key, p in trainer.model.named_parameters() if p.requires_grad} == names
        assert all(torch.equal(p, before[key]) for key, p in trainer.model.named_parameters() if key not in names)
        if name == "pissa":
            a = {key: p for key, p in trainer.model.named_parameters() if "lora_A" in key}
            assert all(torch.equal(p[4:], before[key][4:]) for key, p in a.items())
            assert not any(torch.equal(p[:4], before[key][:4]) for key, p in a.items())
        return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]

    assert learn("with", beta=1e-9) == pytest.approx(learn("without", beta=0.0), rel=1e-3)


def test_adaloras_ranks_fall_as_its_schedule_says():
    """14 layers of 4 ranks, 2 in the end. The budget of step t of 10, with tinit 2 and tfinal 3, is the cubic
    28 + 28 (1 - (t - 2) / 5)^3 from step 3 to 7, rounded down."""
    model, config = wrapped("adalora", adalora_tinit=2, adalora_tfinal=3)
    schedule = RankSchedule(model, config)
    schedule.begin(10)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sums = []
    for step in range(1, 11):
        model.train()(input_ids=TOKENS).logits.square().mean().backward()
        optimizer.step()
        schedule.after_step(step)
        optimizer.zero_grad()
        left = sum(int((e != 0).sum()) for e in schedule.masked())
        assert left == sum(schedule.ranks.values())
        sums.append(left)
        assert model.peft_config["default"].rank_pattern is None  # or PEFT would save a cut adapter
    expected = [math.floor(28 + 28 * (1 - (t - 2) / 5) ** 3) for t in range(3, 8)]
    assert sums == [56, 56, *expected, 28, 28, 28]
    assert schedule.metrics()["adalora/mean_rank"] == 2.0
    assert len(set(schedule.ranks.values())) > 1  # allocated, not cut alike


def test_adaloras_last_ranks_are_chosen_one_step_later_where_that_update_was_skipped():
    model, config = wrapped("adalora", adalora_tinit=1, adalora_tfinal=3)
    schedule = RankSchedule(model, config)
    schedule.begin(6)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sums = []
    for step in (1, 2, 4, 5, 6):  # in step 3 they should be chosen
        model.train()(input_ids=TOKENS).logits.square().mean().backward()
        optimizer.step()
        schedule.after_step(step)
        optimizer.zero_grad()
        sums.append(sum(schedule.ranks.values()))
    assert sums == [56, 28 + 28 // 8, 28, 28, 28]  # step 2: the cubic of half the way


@pytest.mark.parametrize("gradient", [None, math.nan])
def test_adaloras_ranks_stay_where_an_update_was_skipped(gradient):
    """Of on_nonfinite skip: no gradient is left, or with DeepSpeed one that is not finite."""
    model, config = wrapped("adalora", adalora_tinit=0, adalora_tfinal=1)
    schedule = RankSchedule(model, config)
    schedule.begin(3)
    for parameter in schedule.parameters().values():
        parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    callback: Any = AllocateRanks(None, schedule)
    callback.on_optimizer_step(None, SimpleNamespace(global_step=0), None)
    assert schedule.metrics()["adalora/mean_rank"] == 4.0
    assert not model.base_model.rankallocator.exp_avg_ipt


@pytest.mark.parametrize("name", ["adalora", "pissa"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, name):
    def train(folder, resume=None):
        trainer = make_trainer(
            folder, adapter=name, peft=settings(name), engine="fast", max_steps=4,
            rewards=(reward_tokens,), save_strategy="steps", save_steps=2, max_completion_length=4,
            gradient_accumulation_steps=1,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = train(tmp_path / "straight")
    again = train(tmp_path / "again", str(tmp_path / "straight" / "checkpoint-2"))
    for (key, one), (_, other) in zip(straight.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(one, other), key
    if name != "adalora":
        return
    assert straight.ranks.ranks == again.ranks.ranks
    assert straight.ranks.metrics()["adalora/mean_rank"] == 2.0
    logged = [row["adalora/mean_rank"] for row in straight.state.log_history if "adalora/mean_rank" in row]
    assert logged[0] > logged[-1] == 2.0
    (tmp_path / "straight" / "checkpoint-2" / "adalora.safetensors").unlink()
    with pytest.raises(UserError, match=r"checkpoint-2: holds no adalora.safetensors"):
        train(tmp_path / "third", str(tmp_path / "straight" / "checkpoint-2"))


def test_noise_is_on_the_norms_that_ln_tuning_trains_and_gone_bit_for_bit():
    """The same numbers as on the base's own norms, under the same names, on the trained copies alone."""
    patterns = ["post_attention_layernorm", "input_layernorm"], ["nothing"]
    plain = tiny_model(scale=4.0)
    without = NoiseInjector(plain, *patterns, seed=3, relative=False)
    model, _ = wrapped("ln_tuning")
    injector = NoiseInjector(model, *patterns, seed=3, relative=False)
    assert [target.name.removeprefix("base_model.model.") for target in injector.targets] == [
        target.name for target in without.targets
    ]
    with torch.no_grad():
        for target in injector.targets:
            target.weight.mul_(1.5)  # trained
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    with injector.applied(0.1, (0, 0)):
        changed = {key for key, p in model.named_parameters() if not torch.equal(p, before[key])}
    assert changed == {f"{target.name}.ln_tuning_layers.default.weight" for target in injector.targets}
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key]), key


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"target_modules": ["q_proj", "v_porj"]},
            r"^--config.peft.target_modules .'q_proj', 'v_porj'.: the model has no layer v_porj; its linear layers are"
            r" q_proj, k_proj, v_proj, o_proj, gate_proj",
        ),
        (
            {"target_modules": ".*q_project"},
            r"_modules \.\*q_project: the model has no such layer; its linear layers are",
        ),
        ({"type": "ia3", "target_modules": ["query"]}, r"^--config.peft.target_modules .'query'.: the model has no"),
        ({"exclude_modules": ["oproj"]}, r"^--config.peft.exclude_modules .'oproj'.: the model has no layer oproj"),
        ({"exclude_modules": "o_proj|v"}, r"^--config.peft.exclude_modules o_proj\|v: the model has no layer o_proj"),
        (
            {"target_modules": ["lm_head", "q_proj"]},
            r"_modules .*: log-probabilities are computed from the output head",
        ),
        ({"type": "miss", "target_modules": ["embed_tokens"]}, r"_modules .'embed_tokens'.: peft.type miss can't have"),
        (
            {"type": "oft", "target_modules": ["embed_tokens"]},
            r"model.embed_tokens is an embedding, which oft can't",
        ),
        ({"type": "pissa", "r": 65}, r"^--config.peft.r 65: model.layers.0.*singular components; write no more"),
        ({"type": "milora_plus", "r": 65}, r"^--config.peft.r 65: model.layers.0"),
        ({"type": "oft", "oft_block_size": 7}, r"oft_block_size 7: does not divide the 64 inputs of model.layers.0"),
        ({"type": "ln_tuning", "target_modules": ["q_proj"]}, r"model\.layers\.0\.self_attn\.q_proj is no norm"),
        ({"type": "lora_fa", "target_modules": ["embed_tokens"]}, r"_modules: model.embed_tokens is an embedding"),
        ({"type": "milora", "target_modules": ["embed_tokens"]}, r"embed_tokens is an embedding, which milora can't"),
    ],
)
def test_layers_are_checked_by_their_shapes_before_a_weight_is_read(tmp_path, fields, said):
    tiny_model().config.save_pretrained(tmp_path)  # no weights
    with pytest.raises(UserError, match=said):
        check_layers(PeftConfig(**fields), tmp_path)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_finds_its_layers(tmp_path, name):
    tiny_model().config.save_pretrained(tmp_path)
    check_layers(settings(name), tmp_path)
