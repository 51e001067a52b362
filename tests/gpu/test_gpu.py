"""What only a device can show: the same tokens, weights and gradients as on a CPU, with its own kernels, its graphs and
its allocator. They run on a CUDA GPU or an NPU (an emulated one too, without its numerics), and skip on a CPU.
"""

from itertools import pairwise

import pytest
import torch
from peft import get_peft_model
from transformers import TrainerCallback
from trl import GRPOTrainer

from perl import device
from perl.adapters import ADAPTERS
from perl.config.schema import NoiseConfig, PeftConfig
from perl.device.kernels import PAGED, VARLEN
from perl.records import Completion
from perl.training.trainer import PerlGRPOTrainer
from tests import trainers
from tests.tiny import END, WORDS, tiny_model, tiny_tokenizer
from tests.trainers import reward_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device.detect().kind == "cpu", reason="needs a CUDA device or an NPU"),
]

PROMPTS = [[6 + (3 * i + j) % len(WORDS) for j in range(4 + 5 * i)] for i in range(3)]
GROUP = 4
PEFT = PeftConfig(r=4, lora_alpha=8, lora_dropout=0.0)


def make_trainer(folder, **settings):
    """A trainer of a tiny model on the device, in float32 unless `bf16`, with LoRA that changes the model."""
    defaults = {
        "max_steps": 3,
        "num_generations": GROUP,
        "max_completion_length": 24,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "engine": "fast",
        "peft": PEFT,
        "prompts": [f"What is {i} + {j} ?" for i in range(4) for j in range(4)],
        "tokenizer": tiny_tokenizer(chat_template=None),
        "rewards": [reward_tokens],
    }
    settings["rollout"] = {"capture_graphs": False} | settings.get("rollout", {})
    trainer = trainers.make_trainer(folder, **(defaults | settings))
    trainer.state.max_steps = 100  # train() sets its own; a rollout outside of it asks too
    trainers.move_adapter(trainer.model, std=0.1)
    trainer.model.train()
    return trainer


def draw(trainer):
    """Completions of PROMPTS, GROUP of each, by a rollout."""
    trainer.noise_stage.on_step_begin(trainer.args, trainer.state, None)
    completions = trainers.draw(trainer, PROMPTS, GROUP)
    trainer.state.global_step += 1
    return completions


def base(trainer):
    """The frozen weights, and buffers such as the rotary embedding's."""
    state = trainer.model.state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items() if "lora_" not in name}


def assert_same_bits(trainer, before):
    now = base(trainer)
    assert now.keys() == before.keys()
    assert [name for name in before if not torch.equal(now[name], before[name])] == []


def greedy_on_a_cpu(trainer):
    """By transformers' own generate, without padding, the adapter merged into a copy on the CPU."""
    state = {name: tensor.cpu() for name, tensor in trainer.model.state_dict().items()}
    copy = get_peft_model(tiny_model(scale=4.0), ADAPTERS["lora"].build(PEFT))
    copy.load_state_dict(state)
    plain = copy.merge_and_unload().eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        drawn = plain.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=END
        )
        found += [drawn[0, len(prompt) :].tolist()] * GROUP
    return found


@pytest.mark.parametrize(("engine", "kernels"), [("fast", "auto"), ("fast", False), ("generate", False)])
def test_rollouts_are_a_cpus_greedy_tokens(tmp_path, engine, kernels):
    trainer = make_trainer(tmp_path, rollout={"engine": engine}, attention_kernels=kernels, top_k=1)
    assert next(trainer.model.parameters()).device.type == device.detect().kind
    completions = draw(trainer)
    assert completions == greedy_on_a_cpu(trainer)
    assert len({tuple(ids) for ids in completions}) == len(PROMPTS)


@pytest.mark.parametrize("kernels", ["auto", False])
def test_captured_steps_draw_what_steps_without_graphs_draw(tmp_path, monkeypatch, kernels):
    captured = []
    capture = device.capture
    monkeypatch.setattr(device, "capture", lambda *args: (captured.append(1), capture(*args))[1])
    drawn = []
    for on in (False, True):
        trainer = make_trainer(
            tmp_path, rollout={"capture_graphs": on}, attention_kernels=kernels, max_completion_length=150
        )
        drawn.append([draw(trainer) for _ in range(3)])
        assert bool(captured) == on
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn[0][0]}) > len(PROMPTS)  # sampled


@pytest.mark.parametrize("capture_graphs", [False, True])
def test_noise_is_there_while_sampling_and_gone_bit_for_bit(tmp_path, capture_graphs):
    noise = NoiseConfig(enabled=True, seed=3, sigma_start=0.5, sigma_end=0.1)
    model = tiny_model(scale=4.0, dtype=torch.bfloat16)
    trainer = make_trainer(tmp_path, model=model, noise=noise, rollout={"capture_graphs": capture_graphs}, bf16=True)
    before = base(trainer)
    norm = next(module for name, module in trainer.model.named_modules() if name.endswith("post_attention_layernorm"))
    seen = []
    hook = norm.register_forward_pre_hook(lambda module, args: seen.append(module.weight.detach().clone()))
    draw(trainer)
    hook.remove()
    assert not torch.equal(seen[0], norm.weight)
    trainer.train()
    assert_same_bits(trainer, before)
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("capture_graphs", [False, True])
def test_a_merged_adapter_draws_what_an_unmerged_one_does_and_leaves_no_trace(tmp_path, capture_graphs):
    drawn = []
    for merge in (True, False):
        settings = {"merge_adapter": merge, "capture_graphs": capture_graphs}
        trainer = make_trainer(tmp_path, rollout=settings, top_k=1)
        before = base(trainer)
        drawn.append([draw(trainer), draw(trainer)])
        assert_same_bits(trainer, before)
    assert drawn[0] == drawn[1]
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert draw(trainer) != drawn[1][0]  # the adapter had its part in it


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("capture_graphs", [False, True])
def test_three_steps_of_training(tmp_path, bf16, capture_graphs):
    model = tiny_model(scale=4.0, dtype=torch.bfloat16 if bf16 else torch.float32)
    trainer = make_trainer(tmp_path, model=model, rollout={"capture_graphs": capture_graphs}, bf16=bf16)
    before = base(trainer)
    adapter = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert_same_bits(trainer, before)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 3
    assert torch.tensor(losses).isfinite().all()
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            assert parameter.isfinite().all(), name
            assert not torch.equal(parameter, adapter[name]), name


def gradient(folder, kind, bf16):
    """Of one update on given completions: what a step of plain SGD with learning rate 1 takes off the adapter."""
    torch.manual_seed(0)  # of the adapter's A
    model = tiny_model(scale=4.0, dtype=torch.bfloat16 if bf16 else torch.float32)
    plain = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "weight_decay": 0.0}
    trainer = make_trainer(folder, kind=kind, model=model, bf16=bf16, **plain)
    lengths = [24, 3, 11, 1, 7, 20, 2, 16]
    given = [[6 + (5 * row + i) % len(WORDS) for i in range(n)] for row, n in enumerate(lengths)]
    if kind is PerlGRPOTrainer:
        completions = [Completion(token_ids=tuple(ids), finish_reason="stop") for ids in given]
        trainer.step.engine.stream = lambda feed: enumerate(completions)
    else:
        trainer._generate_single_turn = lambda *args, **kwargs: (given, None)
    before = {n: p.detach().clone().float() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    return {n: before[n] - p.detach().float() for n, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-4), (True, 5e-2)])
def test_gradients_of_the_packed_update_are_those_of_trls_padded_one(tmp_path, bf16, tolerance):
    theirs, mine = (gradient(tmp_path, kind, bf16) for kind in (GRPOTrainer, PerlGRPOTrainer))
    assert theirs.keys() == mine.keys()
    assert all(expected.abs().max() > 0 for expected in theirs.values())
    apart = torch.cat([(mine[name] - theirs[name]).flatten() for name in theirs]).norm()
    size = torch.cat([expected.flatten() for expected in theirs.values()]).norm()
    assert apart <= tolerance * size


def seen_by(query, keys, values, scaling):
    """Attention of [queries, heads, dim], the last of them to all of [keys, key heads, dim], in float64."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (states.double().repeat_interleave(group, dim=1) for states in (keys, values))
    scores = scaling * torch.einsum("qhd,khd->hqk", query.double(), keys)
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(1 + len(keys) - len(query))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(dim=-1), values)


def kernel_of(table, dtype, head_dim, block_size=None):
    kernel = table[device.detect().kind]
    if (reason := kernel.missing(dtype, head_dim, block_size)) is not None:
        pytest.skip(reason)
    return kernel


ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""How far numbers of about 1 may be apart."""


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("heads", "key_heads", "head_dim"), [(14, 2, 64), (28, 4, 128), (3, 3, 80)])
def test_the_paged_kernel_reads_the_blocks_of_each_row(dtype, heads, key_heads, head_dim):
    block_size, lengths = 128, [1, 127, 128, 257, 400, 512]
    kernel = kernel_of(PAGED, dtype, head_dim, block_size)
    made = torch.Generator().manual_seed(0)
    where = device.detect().kind
    cache = torch.randn(2, 32, block_size, key_heads, head_dim, generator=made).to(where, dtype)
    table = (1 + torch.randperm(24, generator=made).view(6, 4)).int().to(where)
    query = torch.randn(6, heads, 1, head_dim, generator=made).to(where, dtype)[:, :, 0]
    on_device = lengths if kernel.host_lengths else torch.tensor(lengths, dtype=torch.int32, device=where)
    drawn = kernel(query, *cache, table, on_device, 0.125)
    for row, length in enumerate(lengths):
        keys, values = (states[table[row].long()].flatten(0, 1)[:length] for states in cache)
        torch.testing.assert_close(
            drawn[row].double(), seen_by(query[row][None], keys, values, 0.125)[0], atol=ROUNDED[dtype], rtol=0
        )
        alone = kernel(query[row : row + 1], *cache, table[row : row + 1], on_device[row : row + 1], 0.125)
        assert torch.equal(alone[0], drawn[row])


@pytest.mark.parametrize(("heads", "key_heads", "head_dim"), [(14, 2, 64), (28, 4, 128)])
def test_the_kernel_for_packed_rows_has_the_gradients_of_each_row(heads, key_heads, head_dim):
    dtype, where = torch.bfloat16, device.detect().kind
    kernel = kernel_of(VARLEN, dtype, head_dim)
    cu_query, cu_key = [0, 5, 6, 206], [0, 5, 46, 546]
    made = torch.Generator().manual_seed(0)
    shapes = (206, heads), (546, key_heads), (546, key_heads)
    states = [torch.randn(*shape, head_dim, generator=made).to(where, dtype).requires_grad_() for shape in shapes]
    weights = torch.randn(206, heads, head_dim, generator=made).to(where, dtype)
    ours = kernel(*states, cu_query, cu_key, 0.125)
    gradients = torch.autograd.grad(ours, states, weights)
    rows = [
        seen_by(states[0][a:b], states[1][c:d], states[2][c:d], 0.125)
        for (a, b), (c, d) in zip(pairwise(cu_query), pairwise(cu_key), strict=True)
    ]
    expected = torch.cat(rows)
    torch.testing.assert_close(ours.double(), expected, atol=ROUNDED[dtype], rtol=0)
    for found, wanted in zip(gradients, torch.autograd.grad(expected, states, weights.double()), strict=True):
        assert (found.double() - wanted.double()).norm() < 1e-2 * wanted.double().norm()


class Held(TrainerCallback):
    """Bytes in tensors at the end of each step."""

    def __init__(self):
        self.bytes = []

    def on_step_end(self, args, state, control, **kwargs):
        self.bytes.append(torch.accelerator.memory_allocated())


@pytest.mark.parametrize("capture_graphs", [False, True])
def test_no_rollout_leaves_its_kv_cache_behind(tmp_path, capture_graphs):
    """At most one cache, the decoder's, is alive during the update, however many rollouts there were. The cache is much
    larger than all else that comes and stays, cuBLAS's workspaces (32 MB a stream) included."""
    rows, longest, layers, hidden = 8, 1000, 8, 256
    model = tiny_model(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    cache = rows * longest * layers * 2 * hidden * 4  # 131 MB
    held = Held()
    settings = {"rollout": {"capture_graphs": capture_graphs}, "max_completion_length": longest, "max_steps": 6}
    trainer = make_trainer(tmp_path, model=model, callbacks=[held], **settings)
    before = torch.accelerator.memory_allocated()
    trainer.train()
    assert held.bytes[-1] - held.bytes[1] < cache / 2
    assert held.bytes[-1] - before < 1.75 * cache
