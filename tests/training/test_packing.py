"""Packed micro-batches: the layout by hand, and the same numbers as the padded forward's."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from perl.training.packing import (
    enable_packing,
    forward_arguments,
    pack,
    packed_length,
    split_rows,
)

SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**SIZES, **more)),
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**SIZES, **more)),
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES, **more)),
}

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


def test_layout_by_hand():
    ids, mask, width = micro_batch()
    rows = split_rows(ids, mask, width)
    assert rows == [((5, 6, 7), [11, 12]), ((5, 6, 7), [13, 14, 15, 16]), ((9,), [17, 18, 19]), ((5, 6, 8, 7), [])]
    packed = pack(rows, width, "cpu")
    #                           0  1  2   3   4  5   6   7   8   9  10  11  12  13 14 15 16
    assert packed.input_ids.tolist() == [[5, 6, 7, 11, 12, 7, 13, 14, 15, 16, 9, 17, 18, 19, 5, 6, 8, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1, 2, 3, 0, 1, 2, 3]]
    no = -100
    assert packed.labels.tolist() == [[no, no, no, 11, 12, no, 13, 14, 15, 16, no, 17, 18, 19, no, no, no, no]]
    assert packed_length(rows) == 18  # padded: 4 rows of 8
    assert packed.completions.tolist() == [[3, 4, 0, 0], [6, 7, 8, 9], [11, 12, 13, 0], [0, 0, 0, 0]]
    values = torch.arange(100.0, 117.0)[None]  # the value of token i stands at i - 1
    assert packed.unpack(values).tolist() == [
        [102, 103, 0, 0],
        [105, 106, 107, 108],
        [110, 111, 112, 0],
        [0, 0, 0, 0],
    ]
    # Pairs: prefixes 3 + 0 + 6; rows of 3, 5, 4, 1 tokens after 2, 2, 0, 3 others.
    assert packed.pairs == 9 + (6 + 6) + (10 + 15) + 10 + (3 + 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probabilities_and_gradients_equal_the_padded_forward(name, checkpointing):
    torch.manual_seed(0)
    model = MODELS[name]()
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
    packed = pack(split_rows(ids, mask, width), width, "cpu")
    output = model(**forward_arguments(packed), labels=packed.labels, fused_lm_head=True)
    assert packed.packing.uses.count == SIZES["num_hidden_layers"]
    torch.testing.assert_close(packed.unpack(output.log_probs), expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(packed.unpack(output.entropy), expected[1], atol=1e-6, rtol=1e-6)
    (packed.unpack(output.log_probs) * weights).sum().backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[n], atol=2e-6, rtol=1e-5, msg=n)


def test_forwards_without_a_layout_are_as_before():
    torch.manual_seed(0)
    model = MODELS["qwen2"]().eval()
    ids, mask, _ = micro_batch()
    before = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    generated = model.generate(input_ids=ids[:2], attention_mask=mask[:2], max_new_tokens=5, do_sample=False)
    enable_packing(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits[mask.bool()], before)
    again = model.generate(input_ids=ids[:2], attention_mask=mask[:2], max_new_tokens=5, do_sample=False)
    assert torch.equal(again, generated)


def test_what_cannot_be_packed_says_why():
    eager = MODELS["qwen2"](attn_implementation="eager")
    assert enable_packing(eager) == "attention is eager, not sdpa"
    sliding = MODELS["qwen2"](use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert "SlidingWindow" in enable_packing(sliding)
