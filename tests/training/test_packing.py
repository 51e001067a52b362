"""Packed micro-batches: the layout by hand, and the same numbers as the padded forward's."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from trl.trainer.utils import add_fused_lm_head

import perl.training.packing as packing_module
from perl.records import Trajectory
from perl.runs.metrics import Work
from perl.training.packing import enable_packing, forward_arguments, pack, packed_work
from tests.tiny import tiny_model

pytestmark = pytest.mark.numeric

SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def make(family="qwen2", **more):
    return tiny_model(family, **SIZES, **more)


# Two completions of one prompt, one of another whose prompt is a single token, one that is all masked.
PROMPTS = [[5, 6, 7], [5, 6, 7], [9], [5, 6, 8, 7]]
COMPLETIONS = [[11, 12], [13, 14, 15, 16], [17, 18, 19], []]


def micro_batch(prompts=PROMPTS, completions=COMPLETIONS):
    """Ids and mask as TRL pads them: prompts on the left, completions on the right."""
    prompt_width, width = max(map(len, prompts)), max(map(len, completions))
    ids = [
        [0] * (prompt_width - len(p)) + p + c + [0] * (width - len(c))
        for p, c in zip(prompts, completions, strict=True)
    ]
    mask = [
        [0] * (prompt_width - len(p)) + [1] * (len(p) + len(c)) + [0] * (width - len(c))
        for p, c in zip(prompts, completions, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask), width


def rows_of(prompts=PROMPTS, completions=COMPLETIONS):
    """The same as trajectories."""
    return [
        Trajectory(row={}, position=0, sample=i, prompt_ids=tuple(p), token_ids=c)
        for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]


def test_layout_by_hand():
    rows = rows_of()
    packed = pack(rows, 4, "cpu")
    #                           0  1  2   3   4  5   6   7   8   9  10  11  12  13 14 15 16
    assert packed.input_ids.tolist() == [[5, 6, 7, 11, 12, 7, 13, 14, 15, 16, 9, 17, 18, 19, 5, 6, 8, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.targets.tolist() == [[11, 12, 13, 14, 15, 16, 17, 18, 19]]
    assert packed.packing.scored.tolist() == [2, 3, 5, 6, 7, 8, 10, 11, 12]
    assert packed.packing.groups == [
        (slice(0, 2), [slice(2, 5), slice(5, 10)]),
        (slice(10, 10), [slice(10, 14)]),
        (slice(14, 17), [slice(17, 18)]),
    ]
    assert packed.completions.tolist() == [[1, 2, 0, 0], [3, 4, 5, 6], [7, 8, 9, 0], [0, 0, 0, 0]]
    values = torch.arange(102.0, 111.0)[None]
    assert packed.unpack(values).tolist() == [
        [102, 103, 0, 0],
        [104, 105, 106, 107],
        [108, 109, 110, 0],
        [0, 0, 0, 0],
    ]
    # Pairs: prefixes 3 + 0 + 6; rows of 3, 5, 4, 1 tokens after 2, 2, 0, 3 others.
    pairs = 9 + (6 + 6) + (10 + 15) + 10 + (3 + 1)
    assert packed.work == packed_work(rows) == Work(18, pairs)  # padded: 4 rows of 8


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probabilities_and_gradients_equal_the_padded_forward(name, checkpointing):
    model = make(name)
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    ids, mask, width = micro_batch()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-width] = -100
    weights = torch.randn(len(ids), width)

    padded = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    expected = [padded.log_probs[:, -width:], padded.entropy[:, -width:]]
    (expected[0] * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    assert enable_packing(model) is None
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    packed = pack(rows_of(), width, "cpu")
    output = model(**forward_arguments(packed))
    assert packed.packing.uses == SIZES["layers"]
    torch.testing.assert_close(packed.unpack(output.log_probs), expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(packed.unpack(output.entropy), expected[1], atol=1e-6, rtol=1e-6)
    (packed.unpack(output.log_probs) * weights).sum().backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[n], atol=2e-6, rtol=1e-5, msg=n)


def test_forwards_without_a_layout_are_as_before():
    model = make().eval()
    ids, mask, _ = micro_batch()
    before = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    generated = model.generate(input_ids=ids[:2], attention_mask=mask[:2], max_new_tokens=5, do_sample=False)
    enable_packing(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits[mask.bool()], before)
    again = model.generate(input_ids=ids[:2], attention_mask=mask[:2], max_new_tokens=5, do_sample=False)
    assert torch.equal(again, generated)


def test_what_cannot_be_packed_says_why():
    eager = make(attn_implementation="eager")
    assert enable_packing(eager) == "attention is eager, not sdpa"
    sliding = make(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert "SlidingWindow" in enable_packing(sliding)


def attention_by_hand(query, key, value, packing):
    """softmax(q k) v with a mask of everything: [1, heads, L, L]."""
    tokens = query.shape[2]
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for prefix, rows in packing.groups:
        for own in [prefix, *rows]:
            mask[own, own] = torch.ones(own.stop - own.start, own.stop - own.start, dtype=torch.bool).tril()
            if own != prefix:
                mask[own, prefix] = True
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~mask, float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def varlen(query, key, value, cu_query, cu_key, scaling):
    """A kernel for sequences of different lengths, one after the other."""
    parts = []
    for (start, stop), (first, last) in zip(itertools.pairwise(cu_query), itertools.pairwise(cu_key), strict=True):
        q, k, v = (s.transpose(0, 1)[None] for s in (query[start:stop], key[first:last], value[first:last]))
        mask = torch.ones(stop - start, last - first, dtype=torch.bool).tril(last - first - (stop - start))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("way", ["attend", "_by_row", "_by_kernel"])
def test_each_way_to_attend_gives_the_numbers_and_gradients_of_a_mask(way):
    torch.manual_seed(0)
    _ids, _mask, width = micro_batch()
    packing = pack(rows_of(), width, "cpu").packing
    states = [torch.randn(1, heads, 18, 16, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(1, 18, 4, 16)
    expected = attention_by_hand(*states, packing)
    gradients = torch.autograd.grad((expected * weights).sum(), states)
    ways = {
        "attend": lambda: packing.attend(*states, 0.0, 0.3),
        "_by_row": lambda: packing._by_row(*states, 0.0, 0.3),
        "_by_kernel": lambda: packing._by_kernel(varlen, *states, 0.3),
    }
    found = ways[way]()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for got, wanted in zip(torch.autograd.grad((found * weights).sum(), states), gradients, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_autocast_reaches_the_attention_of_a_packed_forward():
    """float32 weights under bfloat16, as --config.training.bf16 with --config.model.dtype float32."""
    model = make()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    enable_packing(model)
    _ids, _mask, width = micro_batch()
    packed = pack(rows_of(), width, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        lower = model(**forward_arguments(packed)).log_probs
    assert 0 < (lower - model(**forward_arguments(packed)).log_probs).abs().max() < 0.02
    lower.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.any()


@pytest.mark.parametrize(("few", "dtype"), [(90_000, torch.float32), (0, torch.bfloat16)])
def test_the_backward_of_few_bfloat16_numbers_on_a_cpu_is_computed_in_float32(few, dtype, monkeypatch):
    """In bfloat16 it took up to twelve times as long."""
    name, met = "_scaled_dot_product_flash_attention_for_cpu_backward", []
    kernel = getattr(torch.ops.aten, name)

    def spy(*args, **kwargs):
        met.append({args[place].dtype for place in (0, 1, 2, 3, 4)})
        return kernel(*args, **kwargs)

    torch.manual_seed(0)
    states = [torch.randn(1, heads, 11, 16).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    groups = [packing_module.Group(slice(0, 5), [slice(5, 8), slice(8, 11)])]
    exact = [each.detach().float().requires_grad_() for each in states]
    weights = torch.randn(1, 11, 4, 16)
    wanted = torch.autograd.grad((packing_module._CpuAttention.apply(*exact, groups, None) * weights).sum(), exact)
    monkeypatch.setattr(torch.ops.aten, name, spy)
    monkeypatch.setattr(packing_module, "FEW_PAIRS", few)
    found = packing_module._CpuAttention.apply(*states, groups, None)
    gradients = torch.autograd.grad((found * weights).sum(), states)
    assert met == [{dtype}] * 4  # the prompt, two rows, and both rows to the prompt
    for got, exactly in zip(gradients, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), exactly, atol=0.05, rtol=0.05)


def test_on_a_cpu_attention_takes_no_mask(monkeypatch):
    """It was repeated for every query head that shares a key head, in every layer."""
    masks = []
    theirs = F.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return theirs(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model = make()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    enable_packing(model)
    _ids, _mask, width = micro_batch()
    model(**forward_arguments(pack(rows_of(), width, "cpu")))
    assert [m for m in masks if m is not None] == []


def test_the_output_layer_meets_completion_tokens_only():
    model = make("llama")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    enable_packing(model)
    enable_packing(model)  # as often as one likes
    met = []
    model.model.register_forward_hook(lambda module, args, output: met.append(output.last_hidden_state.shape[1]))
    ids, mask, width = micro_batch()
    model(**forward_arguments(pack(rows_of(), width, "cpu")))
    assert met == [9]
    model(input_ids=ids, attention_mask=mask)
    assert met == [9, ids.shape[1]]


def test_a_micro_batch_without_any_completion_token_has_zero_gradients():
    model = make("llama")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    enable_packing(model)
    packed = pack(rows_of([[5], [5]], [[], []]), 4, "cpu")
    assert packed.work.tokens == 2
    found = packed.unpack(model(**forward_arguments(packed)).log_probs)
    assert found.shape == (2, 4)
    assert not found.any()
    found.sum().backward()
    assert not model.model.layers[0].self_attn.q_proj.weight.grad.any()


def test_a_model_that_drops_arguments_of_attention_is_told_at_the_start():
    """Its first packed forward would have stopped the run."""
    model = make("nemotron", attn_implementation="sdpa")
    assert enable_packing(model) == "its layers do not hand arguments on to attention"
    softcapped = make("gemma2", attn_implementation="sdpa", layer_types=["full_attention"] * 3)
    assert "softcap" in enable_packing(softcapped)
    assert model(input_ids=torch.tensor([[5, 6]])).logits.shape == (1, 2, 50)
