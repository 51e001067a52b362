"""The live policy as an engine: its distribution, its noise, the adapter merged into it, and what is left behind."""

import contextlib
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from perl import device
from perl.adapters import rollout_merge
from perl.adapters.delivery import delivered, to_bytes
from perl.base.errors import UserError
from perl.config.schema import RolloutConfig
from perl.engines import runner
from perl.engines.cache import RowCache
from perl.engines.torch_copy import TorchCopy
from perl.engines.torch_policy import TorchPolicyEngine, TorchRules, evaluation_mode, sampling_of
from perl.models.folders import load_model
from perl.noise.injector import NoiseInjector
from perl.records import Prompt, Sampling, Weights
from tests.engines.models import EOS, completions, prompts, tiny
from tests.tiny import save_tiny, tiny_model

SAMPLING = Sampling(temperature=0.9, max_new_tokens=12)
GENERATION = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 12, "eos_token_id": 2, "pad_token_id": 0}


def adapted(moved: bool = True, dropout: float = 0.5, **changes):
    """A policy in training mode."""
    torch.manual_seed(0)
    model = get_peft_model(tiny(**changes), LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout))
    for name, parameter in model.named_parameters():
        if moved and "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model.train()


def make_engine(model=None, *, rollout=None, kwargs=None, dtype=None, **options) -> TorchPolicyEngine:
    generation = GenerationConfig(**(GENERATION | (kwargs or {})))
    return TorchPolicyEngine(model or adapted(), make_rules(generation, kwargs, rollout, dtype), **options)


def make_rules(generation, kwargs=None, rollout=None, dtype=None) -> TorchRules:
    return TorchRules(
        rollout=RolloutConfig(**(rollout or {})),
        processing=None,
        generation_config=generation,
        generation_kwargs=kwargs or {},
        dtype=dtype,
    )


def noise_on(model) -> NoiseInjector:
    return NoiseInjector(model, ["norm"], [], seed=5, relative=False)


def ask(count: int = 6) -> list[Prompt]:
    return [Prompt(token_ids=ids, seed=seed) for seed, ids in enumerate(prompts(count))]


def drawn(engine, asked=None, sampling=SAMPLING) -> list[tuple[int, ...]]:
    found = completions(engine, asked or ask(), sampling)
    return [found[place].token_ids for place in range(len(found))]


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_a_merged_adapter_draws_what_an_unmerged_one_does_and_leaves_every_bit(engine):
    found, logprobs = {}, {}
    for merge in (True, False):
        policy = make_engine(rollout={"engine": engine, "merge_adapter": merge})
        before = state(policy.model)
        torch.manual_seed(3)  # what "generate" draws with
        made = completions(policy, ask(), SAMPLING)
        found[merge] = [made[i].token_ids for i in range(6)]
        logprobs[merge] = torch.tensor([number for i in range(6) for number in made[i].logprobs])
        assert same(state(policy.model), before)
        assert policy.model.training
        assert policy.take_metrics() == ({"rollout/merge_rounding_error": 0.0} if merge else {})
        assert policy.take_metrics() == {}
    assert found[True] == found[False]
    assert torch.allclose(logprobs[True], logprobs[False], atol=1e-4)
    assert any(ids[-1] == 2 for ids in found[True])


def test_the_noise_is_that_of_the_published_weights_and_leaves_every_bit():
    model = adapted()
    policy = make_engine(model, noise=noise_on(model))
    before = state(model)
    clean = drawn(policy)
    assert policy.take_metrics()["aqn/sigma_realized"] == 0.0
    policy.publish(Weights(version=3, sigma=0.3))
    noisy = drawn(policy)
    assert policy.take_metrics()["aqn/sigma_realized"] == pytest.approx(0.3, rel=0.2)
    assert noisy != clean
    assert drawn(policy) == noisy  # several streams of one version
    policy.publish(Weights(version=3, sigma=0.3, draw=1))
    assert drawn(policy) != noisy
    policy.publish(Weights(version=4))
    assert drawn(policy) == clean
    assert same(state(model), before)


def test_a_stream_that_is_broken_off_leaves_every_bit():
    model = adapted()
    policy = make_engine(model, noise=noise_on(model))
    before = state(model)
    policy.publish(Weights(sigma=0.3))
    stream = policy.stream(replace(prompt, sampling=SAMPLING) for prompt in ask())
    next(stream)
    assert not same(state(model), before)
    assert not model.training
    stream.close()
    assert same(state(model), before)
    assert model.training
    assert not policy.merge.merged


def test_rollouts_are_multiplied_in_the_trainers_dtype_and_validations_in_the_evaluators(monkeypatch):
    """Which on a CPU is float32."""
    policy = make_engine(dtype=torch.bfloat16)
    dtypes = []
    prepack = rollout_merge.prepack
    monkeypatch.setattr(
        rollout_merge, "prepack", lambda *args, **kwargs: dtypes.append(args[3]) or prepack(*args, **kwargs)
    )
    drawn(policy)
    assert set(dtypes) == {torch.bfloat16}
    dtypes.clear()
    drawn(policy.evaluating(EOS, None))
    assert set(dtypes) == {None}


@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_an_evaluation_heeds_its_own_rules_alone(engine):
    """Neither generation_kwargs nor TRL's end tokens, and the loop of the rollouts stays as it is."""
    plain = make_engine(rollout={"engine": "fast"})
    ends = frozenset({5})
    expected = drawn(plain.evaluating(ends, 40))
    assert all(
        ids[-1] == 5 or len(ids) == min(12, 40 - len(prompt.token_ids))
        for ids, prompt in zip(expected, ask(), strict=True)
    )
    policy = make_engine(rollout={"engine": engine}, kwargs={"min_new_tokens": 8, "top_k": 1})
    kept = policy.decoder.cache = object()
    with contextlib.closing(policy.evaluating(ends, 40)) as evaluating:
        assert drawn(evaluating) == expected
    assert policy.decoder.cache is kept
    assert policy.take_metrics() == {}


def test_prompts_of_several_distributions_are_each_drawn_by_their_own():
    policy = make_engine()
    greedy = Sampling(temperature=0, max_new_tokens=5)
    mixed = [replace(prompt, sampling=greedy if place % 3 == 0 else SAMPLING) for place, prompt in enumerate(ask())]
    found = dict(policy.stream(mixed))
    for place, prompt in enumerate(mixed):
        assert [found[place].token_ids] == drawn(policy, [prompt], prompt.sampling)


def test_completions_come_while_others_are_drawn_and_prompts_are_taken_meanwhile():
    policy, order = make_engine(), []
    asked = [replace(prompt, sampling=replace(SAMPLING, max_new_tokens=4 + 40 * place)) for place, prompt in
             enumerate(ask(2))]  # fmt: skip
    further = replace(ask(3)[2], sampling=SAMPLING)

    def feed():
        yield from asked
        while 0 not in order:
            yield None
        yield further

    policy.decoder.eos_token_ids = frozenset()
    for place, _ in policy.stream(feed()):
        order.append(place)
    assert order == [0, 2, 1]


def test_generation_kwargs_that_the_loop_does_not_know_reach_the_rollout():
    assert {len(ids) for ids in drawn(make_engine(kwargs={"min_new_tokens": 12}))} == {12}
    assert {len(ids) for ids in drawn(make_engine())} != {12}


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "stop_strings", "min_new_token"])
def test_generation_kwargs_that_no_rollout_can_have_are_refused(name):
    with pytest.raises(UserError, match=f"--config.training.generation_kwargs: .*{name}"):
        TorchPolicyEngine(adapted(), make_rules(GenerationConfig(**GENERATION), {name: 2}))


def test_trls_image_tokens_are_not_drawn():
    sampling = Sampling(temperature=0, max_new_tokens=12)
    first = {ids[0] for ids in drawn(make_engine(), sampling=sampling)}
    policy = TorchPolicyEngine(adapted(), make_rules(GenerationConfig(suppress_tokens=sorted(first), **GENERATION)))
    assert not first & {token for ids in drawn(policy, sampling=sampling) for token in ids}


def test_no_cache_is_held_after_a_rollout_on_a_cpu():
    """On an accelerator it lives on with its graphs (tests/npu/test_captured_graphs.py)."""
    policy = make_engine()
    drawn(policy)
    assert policy.decoder.cache is None


def test_a_resumed_run_decides_on_merging_as_the_whole_one_would(monkeypatch):
    """The rounding error stands between the bounds, where the rollout before decides."""
    whole, resumed, other = (make_engine(adapted().bfloat16()) for _ in range(3))
    found = []
    for engine, errors in ((whole, [0.05, 0.1]), (resumed, [0.1]), (other, [0.1])):
        measured = iter(errors)
        monkeypatch.setattr(engine.merge, "_measure", lambda measured=measured: next(measured))
        if engine is resumed:
            engine.merging = whole.merging
        for _ in errors:
            drawn(engine)
        found.append(engine.merging)
    assert found == [True, True, False]


def test_the_cache_leaves_what_the_first_updates_will_allocate(monkeypatch):
    """2 MB are free; a token is 3 layers of 2 key heads of 16 numbers, keys and values, of 4 bytes: 768 bytes."""
    monkeypatch.setattr(device, "free_memory", lambda: 2_000_000)
    made = []
    monkeypatch.setattr(runner, "RowCache", lambda *args: made.append(args[3]) or RowCache(*args))
    model = adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    assert 12 * count < 1_000_000

    def cached(version, **options):
        engine = make_engine(model, **options)
        engine.publish(Weights(version=version))
        drawn(engine)
        return made.pop()

    assert cached(0) == (2_000_000 - 12 * count) // 2 // 768  # gradients, and Adam's two moments
    assert cached(1) == (2_000_000 - 4 * count) // 2 // 768
    assert cached(0, reserves=False) == 1_000_000 // 768
    trained[0].grad = torch.zeros_like(trained[0])
    assert cached(1) == (2_000_000 - 4 * (count - trained[0].numel())) // 2 // 768
    monkeypatch.setattr(device, "free_memory", lambda: 12 * count - 1)
    assert cached(0) == 0  # one sequence after the other


@pytest.mark.parametrize("rollout", [{"piece_size": 3}, {"workers": 2}])
def test_where_pieces_are_drawn_free_memory_decides_nothing(rollout, monkeypatch):
    """It decided which layers are packed and which rows are decoded together, so that runs with one and with four
    workers had other last bits."""
    asked = []
    monkeypatch.setattr(device, "host_memory", lambda: asked.append(1) or 2**30)
    drawn(make_engine(rollout=rollout))
    assert asked == []
    drawn(make_engine(rollout={"workers": 2, "max_staleness": 1}))
    assert asked


def test_a_piece_has_the_same_bits_whatever_number_of_pieces_is_drawn_in_which_order():
    """64 pieces of four in their order; by another engine 1, 3, 8 and all of them, each time in another order."""
    size, numbers = 4, random.Random(3)
    sampling = replace(SAMPLING, max_new_tokens=5)
    asked = [Prompt(token_ids=ids, seed=seed) for seed, ids in enumerate(prompts(64 * size, longest=12))]

    def pieces(engine, order):
        made = completions(engine, [asked[piece * size + place] for piece in order for place in range(size)], sampling)
        rows = [(made[place].token_ids, made[place].logprobs) for place in range(len(made))]
        return {piece: rows[i * size : (i + 1) * size] for i, piece in enumerate(order)}

    engines = []
    for _ in range(2):
        model = adapted(num_hidden_layers=1)
        engines.append(make_engine(model, rollout={"piece_size": size}, noise=noise_on(model)))
        engines[-1].publish(Weights(version=3, sigma=0.1))
    expected = pieces(engines[0], range(64))
    assert len({len(ids) for rows in expected.values() for ids, _ in rows}) > 3
    for count in (1, 3, 8, 64):
        order = numbers.sample(range(64), count)
        assert pieces(engines[1], order) == {piece: expected[piece] for piece in order}


def test_a_cache_of_pieces_has_its_share_of_the_whole_memory(monkeypatch):
    """A token is 768 bytes; on an accelerator it is half of what the weights leave."""
    monkeypatch.setattr(device, "total_memory", lambda: 8 * 768 * 100)
    made = []
    monkeypatch.setattr(runner, "RowCache", lambda *args: made.append(args[3]) or RowCache(*args))
    engine = make_engine(rollout={"piece_size": 3})
    drawn(engine)
    assert made == [100, 100]
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    engine.decoder.model = SimpleNamespace(device=torch.device("meta"), parameters=engine.model.parameters)
    monkeypatch.setattr(device, "total_memory", lambda: weights + 1000)
    assert engine.decoder.room() == 500
    engine.decoder.copied = 600
    assert engine.decoder.room() == 200


def test_the_quantised_copy_is_counted_where_pieces_are_drawn():
    engine = make_engine(rollout={"piece_size": 3, "quantization": "int8"})
    drawn(engine)
    assert engine.quantised is not None
    assert engine.decoder.copied == engine.quantised.nbytes > 0


def test_a_workers_copy_keeps_no_memory_free_for_an_update(monkeypatch, tmp_path):
    """Of all weights 12 bytes each: at 7B no room for a cache was left."""
    monkeypatch.setattr(device, "free_memory", lambda: 2_000_000)
    base = save_tiny(tmp_path)
    copy = TorchCopy(
        str(base), rules=make_rules(GenerationConfig(**GENERATION)), load={"dtype": torch.float32}, peft_config=None,
        noise=None,
    )  # fmt: skip
    sent = to_bytes(delivered(load_model(base, dtype=torch.float32)))
    with copy.holding(Weights(version=0), "first", (sent, [])):
        assert copy.engine.decoder.reserved == 0


def test_trls_generation_configuration_is_read_whole():
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        max_new_tokens=33,
    )
    assert sampling_of(config) == Sampling(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, max_new_tokens=33
    )
    assert sampling_of(GenerationConfig(max_new_tokens=4)) == Sampling(
        temperature=1.0, top_p=1.0, top_k=sampling_of(GenerationConfig()).top_k, max_new_tokens=4
    )
    assert sampling_of(GenerationConfig(do_sample=False, temperature=0.7, max_new_tokens=4)) == Sampling(
        temperature=0.0, max_new_tokens=4
    )


def test_evaluation_mode_gives_each_module_its_own_flag_back():
    base = tiny_model("mistral", attention_dropout=0.5)
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", lora_dropout=0.5)).train()
    base.model.norm.eval()

    def stop():
        raise RuntimeError("stop")

    for body in (lambda: None, stop):
        try:
            with evaluation_mode(model):
                assert not any(module.training for module in model.modules())
                body()
        except RuntimeError:
            pass
        off = {name for name, module in model.named_modules() if not module.training}
        assert off == {"base_model.model.model.norm"}


SCRIPT = """
import datetime, sys
from pathlib import Path
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from perl.device.sharding import is_sharded
from perl.records import Sampling
from tests.engines import test_torch_policy as tests
from tests.engines.models import completions, tiny

engine, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
limit = datetime.timedelta(seconds=100)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
model = tiny("qwen2").train()
policy = tests.make_engine(model, rollout={"engine": engine})
sampling = Sampling(temperature=0, max_new_tokens=12)
policy.generation_config.do_sample = False


def of_both_kinds(count):
    # The second half from another distribution, which the other rank does not have.
    asked = tests.ask(count)
    kinds = [sampling, Sampling(temperature=0, max_new_tokens=12, repetition_penalty=1.5)]
    return [tests.replace(prompt, sampling=kinds[place >= count // 2]) for place, prompt in enumerate(asked)]


def all_of():
    rollouts = [tests.drawn(policy, tests.ask(3 + 3 * rank), sampling)]
    rollouts.append(tests.drawn(policy, tests.ask(5), sampling) if rank else dict(policy.stream([])))
    if engine == "fast":
        rollouts.append({k: v.token_ids for k, v in policy.stream(of_both_kinds(8 if rank else 0))})
    rollouts.append(tests.drawn(policy.evaluating(tests.EOS, 64), tests.ask(3 + 3 * rank), sampling))
    return rollouts


alone = all_of()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
assert is_sharded(model)
assert all_of() == alone
Path(f"{store}.equal{rank}").touch()
dist.barrier()  # a rank that leaves early can have gloo end the other one with "terminate called"
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_fsdp2_ranks_need_not_have_equally_many_prompts(engine, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, engine, str(rank), str(tmp_path / "store")],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    done = [rank.communicate(timeout=200) for rank in ranks]
    for rank, (_, errors) in enumerate(done):  # not by its exit code: gloo may crash after the end, at its threads' end
        assert (tmp_path / f"store.equal{rank}").exists(), errors[-3000:]
