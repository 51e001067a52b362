"""The fast loop gives what stock generate gives, with less work."""

import copy
import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessor,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from perl.engines.base import warn_once
from perl.engines.fast import decode_fast, unsupported_reason
from perl.engines.loop import REFILL_SHARE
from perl.engines.rows import Finished, Job, Row, left_pad
from perl.engines.stock import decode_stock
from perl.records import Sampling
from tests.engines.models import EOS, SHAPE, make_job, prompts, tiny


def in_order(rows) -> list[Finished]:
    rows = sorted(rows, key=lambda finished: finished.index)
    assert [finished.index for finished in rows] == list(range(len(rows)))
    return rows


def tokens(rows) -> list[list[int]]:
    return [finished.token_ids for finished in in_order(rows)]


class Forwards:
    """Counts what a model computes: (rows, columns) of each forward of more than one token, and of one token."""

    def __init__(self, model):
        self.prefills: list[tuple[int, int]] = []
        self.steps: list[tuple[int, int]] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _, args, kwargs):
        kind = self.steps if kwargs["past_key_values"].get_seq_length() else self.prefills
        kind.append((kwargs["input_ids"].shape[0], kwargs["attention_mask"].shape[-1]))


@pytest.mark.parametrize(
    ("family", "attention", "count"), [("qwen2", "sdpa", 200), ("llama", "sdpa", 200), ("qwen2", "eager", 40)]
)
def test_greedy_is_token_for_token_that_of_plain_generate(family, attention, count):
    model = tiny(family)
    model.set_attn_implementation(attention)
    prompt_ids = prompts(count)
    drawn = in_order(decode_fast(model, make_job(prompt_ids)))
    for first in range(0, count, 40):
        ids, mask = left_pad(prompt_ids[first : first + 40], 0, model.device)
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)[:, ids.shape[1] :]
        for expected, finished in zip(output.tolist(), drawn[first:], strict=False):
            assert finished.stopped == (2 in expected)
            length = expected.index(2) + 1 if finished.stopped else 24
            assert finished.token_ids == expected[:length]
    assert Counter(finished.stopped for finished in drawn).keys() == {True, False}


@pytest.mark.parametrize("group_size", [1, 8])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, top_p=0.9, top_k=20),
        Sampling(min_p=0.05),
        Sampling(temperature=0, repetition_penalty=1.5),
        Sampling(temperature=0.9, repetition_penalty=1.2),
    ],
)
def test_rows_are_those_of_stock_generate_with_the_same_seeds(sampling, group_size):
    model = tiny()
    job = make_job(prompts(160 // group_size), sampling, group_size=group_size)
    fast, stock = in_order(decode_fast(model, job)), in_order(decode_stock(model, job))
    assert tokens(fast) == tokens(stock)
    for mine, theirs in zip(fast, stock, strict=True):
        assert mine.stopped == theirs.stopped
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_repetition_penalty_is_that_of_transformers():
    model = tiny()
    prompt_ids = prompts(15)
    drawn = tokens(decode_fast(model, make_job(prompt_ids, Sampling(temperature=0, repetition_penalty=1.5))))
    for prompt, mine in zip(prompt_ids, drawn, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, repetition_penalty=1.5
        )
        assert mine == expected[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_a_forward_over_the_whole_row():
    model = tiny()
    sampling = Sampling(temperature=0.8, top_k=10, repetition_penalty=1.1)
    job = make_job(prompts(30), sampling)
    for row, finished in zip(job.rows, in_order(decode_fast(model, job)), strict=True):
        ids = torch.tensor([[*row.prompt_ids, *finished.token_ids]])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.8).log_softmax(dim=-1)
        expected = logprobs.gather(1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        assert finished.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_sampled_pairs_of_tokens_follow_the_models_distribution():
    vocabulary, rows = 5, 20_000
    model = tiny(vocab_size=vocabulary, spread=6.0)
    prompt = (3, 4, 3)
    job = make_job([prompt], Sampling(temperature=1.3), group_size=rows, max_new_tokens=2, max_batch_tokens=10_000)
    counts = Counter(tuple(row) for row in tokens(decode_fast(model, job)))
    pairs = list(itertools.product(range(vocabulary), repeat=2))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *pair] for pair in pairs])).logits / 1.3
    steps = logits[:, len(prompt) - 1 : -1].log_softmax(dim=-1)
    probabilities = steps.gather(-1, torch.tensor(pairs)[:, :, None]).sum(dim=(1, 2)).exp().tolist()
    expected: Counter = Counter()  # rows that ended with the first token have no second one
    for pair, probability in zip(pairs, probabilities, strict=True):
        expected[pair[:1] if pair[0] in EOS else pair] += rows * probability
    assert counts.keys() <= expected.keys()
    assert min(expected.values()) > 5
    statistic = sum((counts[cell] - mean) ** 2 / mean for cell, mean in expected.items())
    assert len(expected) == 21
    assert statistic < 45.3  # 99.9 % quantile with 20 degrees of freedom


@pytest.mark.parametrize("budget", [1, 70, 200, 1_000, 100_000])
def test_rows_do_not_depend_on_the_batch_budget_or_the_order(budget):
    model = tiny()
    job = make_job(prompts(20), Sampling(), group_size=3, max_new_tokens=12)
    expected = tokens(decode_fast(model, job))
    order = np.random.default_rng(0).permutation(len(job.rows))
    shuffled = Job(
        rows=[job.rows[i] for i in order],
        sampling=job.sampling,
        eos_token_ids=EOS,
        pad_token_id=5,
        max_batch_tokens=budget,
    )
    forwards = Forwards(model)
    assert tokens(decode_fast(model, shuffled)) == [expected[i] for i in order]
    widest = max(len(row.prompt_ids) for row in job.rows) + 12
    assert max(rows * width for rows, width in forwards.steps) <= max(budget, widest)


def test_each_prompt_is_prefilled_once_and_no_row_is_decoded_beyond_its_end():
    model = tiny()
    prompt_ids = [prompt for prompt in prompts(30) if len(prompt) > 1]
    job = make_job(prompt_ids, Sampling(), group_size=8, max_new_tokens=32, max_batch_tokens=2_000)
    forwards = Forwards(model)
    drawn = in_order(decode_fast(model, job))
    assert len({len(finished.token_ids) for finished in drawn}) > 10
    assert sum(rows for rows, _ in forwards.prefills) == len(set(prompt_ids))
    assert sum(rows for rows, _ in forwards.steps) == sum(len(finished.token_ids) - 1 for finished in drawn)


def test_batch_stays_full_while_rows_wait():
    model = tiny()
    job = make_job([(5, 6, 7)], Sampling(), group_size=300, max_new_tokens=29, max_batch_tokens=32 * 32)
    forwards = Forwards(model)
    drawn = in_order(decode_fast(model, job))
    busy = [rows for rows, _ in forwards.steps]
    last_refill = max(i for i, rows in enumerate(busy) if rows > 32 - 32 // REFILL_SHARE)
    assert min(busy[:last_refill]) > 32 - 32 // REFILL_SHARE
    assert sum(busy) == sum(len(finished.token_ids) - 1 for finished in drawn)
    assert len(busy) - last_refill <= 29


def test_rows_stream_out_as_they_end():
    model = tiny()
    rows = [Row(prompt_ids=(5, 6), seed=0, max_new_tokens=2), Row(prompt_ids=(7, 8), seed=1, max_new_tokens=20)]
    job = Job(rows=rows, sampling=Sampling(), eos_token_ids=frozenset(), pad_token_id=0)
    forwards = Forwards(model)
    stream = decode_fast(model, job)
    assert next(stream).index == 0
    assert len(forwards.steps) == 1
    assert next(stream).index == 1
    assert len(forwards.steps) == 19


def test_rows_that_end_with_their_first_token():
    model = tiny()
    prompt_ids = prompts(60)
    first = Counter(row[0] for row in tokens(decode_fast(model, make_job(prompt_ids, max_new_tokens=1))))
    common = first.most_common(1)[0][0]
    forwards = Forwards(model)
    job = make_job(prompt_ids, max_new_tokens=1, max_batch_tokens=200)
    assert [len(row) for row in tokens(decode_fast(model, job))] == [1] * 60
    assert forwards.steps == []
    job = make_job(prompt_ids, max_new_tokens=9, max_batch_tokens=200, eos=frozenset({common}))
    drawn = in_order(decode_fast(model, job))
    assert tokens(drawn) == tokens(decode_stock(model, job))
    assert sum(len(finished.token_ids) == 1 and finished.stopped for finished in drawn) == first[common]
    job = make_job(prompt_ids, max_new_tokens=9, max_batch_tokens=200, eos=frozenset(first))
    assert [len(row) for row in tokens(decode_fast(model, job))] == [1] * 60


def test_no_rows():
    assert list(decode_fast(tiny(), make_job([]))) == []


def test_peft_model_is_sampled_with_its_adapter():
    base = tiny()
    peft_model = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ).eval()
    assert unsupported_reason(peft_model) is None
    job = make_job(prompts(40), Sampling(), group_size=2)
    adapted = tokens(decode_fast(peft_model, job))
    assert adapted == tokens(decode_stock(peft_model, job))
    assert adapted == tokens(decode_fast(copy.deepcopy(peft_model).merge_and_unload(), job))
    with peft_model.disable_adapter():
        plain = tokens(decode_fast(peft_model, job, stream=False))
    assert plain == tokens(decode_fast(base, job))
    assert sum(mine == theirs for mine, theirs in zip(adapted, plain, strict=True)) < 20


class NoRepeat(LogitsProcessor):
    """Forbids the last token to come again."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


def test_logits_processors_change_the_choice_and_not_the_logprobs():
    model = tiny()
    job = make_job(prompts(40), Sampling(), group_size=2)
    fast, stock = [in_order(decode(model, job, [NoRepeat()])) for decode in (decode_fast, decode_stock)]
    assert tokens(fast) == tokens(stock)
    assert all(a != b for finished in fast for a, b in itertools.pairwise(finished.token_ids))
    assert any(a == b for row in tokens(decode_fast(model, job)) for a, b in itertools.pairwise(row))
    for mine, theirs in zip(fast, stock, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    row, finished = job.rows[0], fast[0]
    with torch.no_grad():
        logprobs = model(torch.tensor([row.prompt_ids])).logits[0, -1].log_softmax(dim=-1)
    assert finished.logprobs[0] == pytest.approx(logprobs[finished.token_ids[0]].item(), abs=1e-4)


def test_what_cannot_be_served_is_named():
    small = {"vocab_size": 61, "hidden_size": 16}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llava = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={"model_type": "llama", **SHAPE},
            vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **vision},
        )
    )
    assert unsupported_reason(tiny("qwen2")) is None
    assert unsupported_reason(tiny("llama")) is None
    assert unsupported_reason(t5) == "it is an encoder-decoder"
    assert unsupported_reason(llava) == "it takes more than text"
    assert unsupported_reason(BloomForCausalLM(BloomConfig(n_layer=1, n_head=2, **small))) == "it takes no position_ids"
    mamba = MambaForCausalLM(MambaConfig(num_hidden_layers=1, **small))
    assert unsupported_reason(mamba) == "its cache is recurrent"
    mistral = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))
    assert unsupported_reason(mistral) == "its cache has DynamicSlidingWindowLayer"
    assert unsupported_reason(get_peft_model(mistral, LoraConfig(target_modules="all-linear"))) is not None
    virtual = get_peft_model(tiny(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert unsupported_reason(virtual) == "PROMPT_TUNING puts virtual tokens before the prompt"


def test_captured_graphs_on_a_cpu_are_said_not_to_be_there(caplog):
    warn_once.cache_clear()
    job = dataclasses.replace(make_job(prompts(2)), capture=True)
    assert len(list(decode_fast(tiny(), job))) == 2
    assert [record.message for record in caplog.records] == [
        "decoding without captured graphs: there are none on a cpu"
    ]
