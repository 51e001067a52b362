"""The decode loop gives what stock generate gives, with less work."""

import copy
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
    T5Config,
    T5ForConditionalGeneration,
)

from perl.base.errors import UserError
from perl.engines import scheduler
from perl.engines.decoder import unsupported_reason
from perl.engines.graphs import rounded
from perl.engines.scheduler import REFILL_SHARE, Sequence, left_pad, mark_seen
from perl.records import Sampling
from tests.engines import models
from tests.engines.models import EOS, SHAPE, complete, decode, decoder, make_sequences, prompts, stock

pytestmark = pytest.mark.numeric


def tiny(*args, **changes):
    """In float64, where rounding, which differs between processors and batches, does not choose between two tokens."""
    return models.tiny(*args, **({"dtype": torch.float64} | changes))


def tokens(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.token_ids for sequence in sequences]


SAMPLED = Sampling(temperature=1.0)


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
    ("family", "attention", "count", "dtype"),
    [
        ("qwen2", "sdpa", 200, torch.float64),
        ("llama", "sdpa", 200, torch.float64),
        ("qwen2", "eager", 40, torch.float32),  # whose softmax is in float32, where float64's mask is infinite
    ],
)
def test_greedy_is_token_for_token_that_of_plain_generate(family, attention, count, dtype):
    model = tiny(family, dtype=dtype)
    model.set_attn_implementation(attention)
    prompt_ids = prompts(count)
    drawn = decode(model, make_sequences(prompt_ids))
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
    asked = prompts(160 // group_size)
    mine_all = decode(model, make_sequences(asked, group_size=group_size), sampling)
    theirs_all = stock(model, make_sequences(asked, group_size=group_size), sampling)
    assert tokens(mine_all) == tokens(theirs_all)
    for mine, theirs in zip(mine_all, theirs_all, strict=True):
        assert mine.stopped == theirs.stopped
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_repetition_penalty_is_that_of_transformers():
    model = tiny()
    prompt_ids = prompts(15)
    drawn = tokens(decode(model, make_sequences(prompt_ids), Sampling(temperature=0, repetition_penalty=1.5)))
    for prompt, mine in zip(prompt_ids, drawn, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, repetition_penalty=1.5
        )
        assert mine == expected[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_a_forward_over_the_whole_row():
    model = tiny()
    sampling = Sampling(temperature=0.8, top_k=10, repetition_penalty=1.1)
    for finished in decode(model, make_sequences(prompts(30)), sampling):
        ids = torch.tensor([[*finished.prompt_ids, *finished.token_ids]])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, len(finished.prompt_ids) - 1 : -1] / 0.8).log_softmax(dim=-1)
        expected = logprobs.gather(1, ids[0, len(finished.prompt_ids) :, None])[:, 0]
        assert finished.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_sampled_pairs_of_tokens_follow_the_models_distribution():
    vocabulary, rows = 5, 20_000
    model = tiny(vocab_size=vocabulary, spread=6.0)
    prompt = (3, 4, 3)
    asked = make_sequences([prompt], group_size=rows, max_new_tokens=2)
    counts = Counter(tuple(row) for row in tokens(decode(model, asked, Sampling(temperature=1.3), max_num_seqs=2_000)))
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


LAYOUTS = {"rows": None, "blocks": 16}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 70, 200, 1_000, 100_000])
def test_sequences_do_not_depend_on_the_memory_or_the_order(budget, layout):
    """Where memory is short, rows are parked and computed again."""
    model = tiny()
    asked = make_sequences(prompts(20), group_size=3, max_new_tokens=12)
    expected = tokens(decode(model, asked, Sampling()))
    order = np.random.default_rng(0).permutation(len(asked))
    fresh = make_sequences(prompts(20), group_size=3, max_new_tokens=12)
    shuffled = [fresh[i] for i in order]
    forwards = Forwards(model)
    options = {"pad_token_id": 5, "max_batch_tokens": budget, "block_size": LAYOUTS[layout]}
    drawn = decode(model, shuffled, Sampling(), **options)
    assert tokens(drawn) == [expected[i] for i in order]
    if layout == "rows":
        longest = max(len(sequence.prompt_ids) for sequence in asked) + 12
        assert max(rows for rows, _ in forwards.steps) <= max(1, budget // 2)
        assert budget > 1 or max(rows for rows, _ in forwards.steps) == 1
        assert longest > 16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parked_sequences_get_the_tokens_that_they_would_have_got(layout):
    """A budget that lets all in and has no room for their growth."""
    model = tiny()
    asked = [prompt for prompt in prompts(40) if len(prompt) > 8][:8]
    eos = frozenset()
    expected = decode(model, make_sequences(asked, max_new_tokens=60), Sampling(), eos_token_ids=eos)
    forwards = Forwards(model)
    sequences = make_sequences(asked, max_new_tokens=60)
    budget = sum(map(len, asked)) + 8 * 40
    tight = decode(model, sequences, Sampling(), eos_token_ids=eos, max_batch_tokens=budget, block_size=LAYOUTS[layout])
    assert tokens(tight) == tokens(expected)
    assert sum(rows for rows, _ in forwards.prefills) > len(asked)  # some were computed again
    for mine, theirs in zip(tight, expected, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parked_sequences_that_have_come_to_the_same_tokens_are_all_completed(layout):
    """Greedy completions of one prompt are alike, so that parked ones share what they are computed from."""
    model = tiny()
    asked = make_sequences([tuple(range(3, 23)), tuple(range(30, 55))], group_size=6, max_new_tokens=60)
    drawn = decode(model, asked, eos_token_ids=frozenset(), max_batch_tokens=500, block_size=LAYOUTS[layout])
    assert [len(sequence.token_ids) for sequence in drawn] == [60] * 12
    for group in (drawn[:6], drawn[6:]):
        assert len({tuple(sequence.token_ids) for sequence in group}) == 1


@pytest.mark.parametrize("budget", [16, 48, 160])
def test_prompts_that_fill_all_blocks_leave_room_for_one_sequence(budget):
    model = tiny()
    sizes = [30, 33, 17, 64, 48, 5]
    asked = make_sequences([tuple(range(3, 3 + size)) for size in sizes if size < 58] * 2, max_new_tokens=30)
    expected = decode(model, make_sequences([s.prompt_ids for s in asked], max_new_tokens=30), Sampling())
    drawn = decode(model, asked, Sampling(), max_batch_tokens=budget, block_size=16)
    assert tokens(drawn) == tokens(expected)


def test_a_prompts_blocks_are_shared_by_its_sequences():
    model = tiny()
    machine = decoder(model, block_size=16, max_batch_tokens=100_000)
    held = []

    def watch(_, args, kwargs):
        cache = machine.cache
        if cache is not None and cache.held:
            held.append((len(cache.held), len({block for row in cache.rows for block in row})))

    model.register_forward_pre_hook(watch, with_kwargs=True)
    prompt = tuple(range(3, 3 + 40))
    complete(machine, make_sequences([prompt], group_size=8, max_new_tokens=6), Sampling())
    assert max(held) == (8, 2 + 8)  # 40 tokens are two full blocks, and each sequence has one of its own
    assert machine.cache is not None
    assert len(machine.cache.free) == len(machine.cache.users) - 1  # all are free again


def test_a_long_budget_is_no_longer_a_share_for_each_sequence():
    """64 sequences that might come to 33 times their mean length are decoded together."""
    model = tiny(vocab_size=5, spread=1.0)
    asked = make_sequences([(3, 4, 3)], group_size=64, max_new_tokens=400)
    forwards = Forwards(model)
    drawn = decode(model, asked, Sampling(), max_batch_tokens=4_000)
    assert len(forwards.steps) <= 1.1 * max(len(sequence.token_ids) for sequence in drawn)
    assert max(rows for rows, _ in forwards.steps) > 40


def test_each_prompt_is_prefilled_once_and_no_row_is_decoded_beyond_its_end():
    model = tiny()
    prompt_ids = [prompt for prompt in prompts(30) if len(prompt) > 1]
    asked = make_sequences(prompt_ids, group_size=8, max_new_tokens=32)
    forwards = Forwards(model)
    drawn = decode(model, asked, Sampling(), max_num_seqs=30, max_batch_tokens=10_000)
    assert len({len(sequence.token_ids) for sequence in drawn}) > 10
    assert sum(rows for rows, _ in forwards.prefills) == len(set(prompt_ids))
    assert sum(rows for rows, _ in forwards.steps) == sum(len(sequence.token_ids) - 1 for sequence in drawn)


def test_batch_stays_full_while_rows_wait():
    model = tiny()
    asked = make_sequences([(5, 6, 7)], group_size=300, max_new_tokens=29)
    forwards = Forwards(model)
    drawn = decode(model, asked, Sampling(), max_num_seqs=32, max_batch_tokens=10_000)
    busy = [rows for rows, _ in forwards.steps]
    last_refill = max(i for i, rows in enumerate(busy) if rows > 32 - 32 // REFILL_SHARE)
    assert min(busy[:last_refill]) > 32 - 32 // REFILL_SHARE
    assert sum(busy) == sum(len(sequence.token_ids) - 1 for sequence in drawn)
    assert len(busy) - last_refill <= 29


def test_sequences_stream_out_as_they_end():
    model = tiny()
    asked = [Sequence((5, 6), 0, 2), Sequence((7, 8), 1, 20)]
    forwards = Forwards(model)
    stream = decoder(model, eos_token_ids=frozenset()).run(asked, Sampling())
    assert next(stream).index == 0
    assert len(forwards.steps) == 1
    assert next(stream).index == 1
    assert len(forwards.steps) == 19


def test_sequences_that_end_with_their_first_token():
    model = tiny()
    prompt_ids = prompts(60)
    first = Counter(row[0] for row in tokens(decode(model, make_sequences(prompt_ids, max_new_tokens=1))))
    common = first.most_common(1)[0][0]
    forwards = Forwards(model)
    asked = make_sequences(prompt_ids, max_new_tokens=1)
    assert [len(row) for row in tokens(decode(model, asked, max_batch_tokens=200))] == [1] * 60
    assert forwards.steps == []
    options = {"max_batch_tokens": 200, "eos_token_ids": frozenset({common})}
    drawn = decode(model, make_sequences(prompt_ids, max_new_tokens=9), **options)
    assert tokens(drawn) == tokens(stock(model, make_sequences(prompt_ids, max_new_tokens=9), **options))
    assert sum(len(finished.token_ids) == 1 and finished.stopped for finished in drawn) == first[common]
    options["eos_token_ids"] = frozenset(first)
    ended = decode(model, make_sequences(prompt_ids, max_new_tokens=9), **options)
    assert [len(row) for row in tokens(ended)] == [1] * 60


def test_a_decoder_runs_again_and_keeps_its_cache():
    """Longer sequences, more of them, and another distribution the next time."""
    model = tiny()
    for layout in (None, 16):
        machine = decoder(model, block_size=layout, max_batch_tokens=100_000)
        complete(machine, make_sequences(prompts(4)), Sampling())
        cache = machine.cache
        for sampling, count, longest in (
            (Sampling(), 4, 24),
            (Sampling(temperature=0.7, repetition_penalty=1.2), 4, 24),
            (Sampling(), 30, 200),
        ):
            asked = make_sequences(prompts(count), max_new_tokens=longest)
            expected = decode(model, make_sequences(prompts(count), max_new_tokens=longest), sampling)
            assert tokens(complete(machine, asked, sampling)) == tokens(expected)
            assert machine.cache is cache


@pytest.mark.parametrize(
    ("count", "length", "group", "before"), [(16, 1000, 1, 100), (8, 500, 2, 60), (8, 200, 2, 900)]
)
def test_what_a_run_computes_together_does_not_depend_on_the_runs_before(count, length, group, before):
    """An accelerator's cache is as large as what was drawn before; its prompts were prefilled four at a time after
    shorter ones, eight by a fresh decoder."""

    def piece(length, seed):
        tokens = np.random.default_rng(seed).integers(3, 61, size=(count, length))
        return [
            Sequence(tuple(map(int, row[: length - place])), 100 * place + sample, 32)
            for place, row in enumerate(tokens)
            for sample in range(group)
        ]

    model = tiny(max_position_embeddings=4096, spread=1.0)
    counted, options = Forwards(model), {"block_size": 128, "fixed": True, "max_batch_tokens": None}
    fresh = complete(decoder(model, **options), piece(length, 1), SAMPLED)
    expected = counted.prefills.copy(), counted.steps.copy()
    used = decoder(model, **options)
    complete(used, piece(before, 2), SAMPLED)
    counted.prefills.clear()
    counted.steps.clear()
    again = complete(used, piece(length, 1), SAMPLED)
    assert (counted.prefills, counted.steps) == expected
    assert [(s.token_ids, s.logprobs) for s in again] == [(s.token_ids, s.logprobs) for s in fresh]


def test_no_rows():
    assert decode(tiny(), []) == []


def test_peft_model_is_sampled_with_its_adapter():
    base = tiny()
    peft_model = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ).eval()
    assert unsupported_reason(peft_model) is None

    def draw(model, how=decode):
        return tokens(how(model, make_sequences(prompts(40), group_size=2), Sampling()))

    adapted = draw(peft_model)
    assert adapted == draw(peft_model, stock)
    assert adapted == draw(copy.deepcopy(peft_model).merge_and_unload())
    with peft_model.disable_adapter():
        plain = draw(peft_model)
    assert plain == draw(base)
    assert sum(mine == theirs for mine, theirs in zip(adapted, plain, strict=True)) < 20


def test_what_goes_to_the_device_goes_in_one_copy_from_the_host(monkeypatch):
    """From memory that is not pinned the host would wait for all that the device still has to compute."""
    copied = []
    monkeypatch.setattr(scheduler.device, "to_device", lambda tensor, where: copied.append(tensor) or tensor)
    ids, mask = left_pad([[1, 2, 3], [4]], 0, torch.device("meta"))
    assert (ids.tolist(), mask.tolist()) == ([[1, 2, 3], [0, 0, 4]], [[1, 1, 1], [0, 0, 1]])
    seen = mark_seen([[1, 2, 1], [4]], 5, torch.device("cpu"))
    assert seen.tolist() == [[False, True, True, False, False], [False, False, False, False, True]]
    assert len(copied) == 2


class NoRepeat(LogitsProcessor):
    """Forbids the last token to come again."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


def test_logits_processors_change_the_choice_and_not_the_logprobs():
    model, machine = tiny(), decoder(tiny())
    machine.processors = [NoRepeat()]

    def asked():
        return make_sequences(prompts(40), group_size=2)

    fast = complete(machine, asked(), Sampling())
    theirs = stock(model, asked(), Sampling(), processors=[NoRepeat()])
    assert tokens(fast) == tokens(theirs)
    assert all(a != b for finished in fast for a, b in itertools.pairwise(finished.token_ids))
    assert any(a == b for row in tokens(decode(model, asked(), Sampling())) for a, b in itertools.pairwise(row))
    for mine, other in zip(fast, theirs, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    finished = fast[0]
    with torch.no_grad():
        logprobs = model(torch.tensor([finished.prompt_ids])).logits[0, -1].log_softmax(dim=-1)
    assert finished.logprobs[0] == pytest.approx(logprobs[finished.token_ids[0]].item(), abs=1e-4)


def test_generation_kwargs_that_the_loop_does_not_serve_are_left_to_generate(caplog):
    """The review's: they were dropped without a word."""
    model = tiny()
    asked = make_sequences(prompts(30), max_new_tokens=10)
    assert min(map(len, tokens(decode(model, asked, Sampling())))) < 6
    again = make_sequences(prompts(30), max_new_tokens=10)
    drawn = decode(model, again, Sampling(), generation_kwargs={"min_new_tokens": 6, "suppress_tokens": [7, 8]})
    assert min(map(len, tokens(drawn))) >= 6
    assert not {7, 8} & {token for row in tokens(drawn) for token in row}
    assert [record.message for record in caplog.records] == [
        "decoding with the model's own generate, as the decode loop can't serve it:"
        " generation_kwargs has min_new_tokens, suppress_tokens"
    ]


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
    mistral = tiny("mistral", sliding_window=8)
    assert unsupported_reason(mistral) == "its cache has DynamicSlidingWindowLayer"
    assert unsupported_reason(get_peft_model(mistral, LoraConfig(target_modules="all-linear"))) is not None
    virtual = get_peft_model(tiny(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert unsupported_reason(virtual) == "PROMPT_TUNING puts virtual tokens before the prompt"


def test_a_model_that_the_loop_cannot_serve_is_left_to_generate_and_that_is_said_once(caplog):
    model = tiny("mistral", spread=1.0, sliding_window=8)
    first = tokens(decode(model, make_sequences(prompts(5)), Sampling(), max_batch_tokens=50))
    assert tokens(decode(model, make_sequences(prompts(5)), Sampling())) == first
    assert len(caplog.records) == 1
    assert caplog.records[0].message.endswith("its cache has DynamicSlidingWindowLayer")


def test_a_distribution_that_cannot_be_is_named():
    with pytest.raises(UserError, match="min_p: 1 is not possible"):
        decode(tiny(), make_sequences(prompts(2)), Sampling(min_p=1))


def test_a_cache_of_rounded_size_cuts_the_shape_of_no_captured_step():
    """So that it is the same whatever the cache has held before: it was (8, 640) in a new one."""
    assert rounded(3, 600) == (8, 768)
    assert rounded(3, 600, 3, 640) == (3, 640)
    for before in [(3, 600), (65, 700), (9, 5000)]:
        held = rounded(*map(max, before, (3, 600)))
        assert rounded(3, 600, *held) == (8, 768)


def test_captured_graphs_on_a_cpu_are_said_not_to_be_there(caplog):
    assert len(decode(tiny(), make_sequences(prompts(2)), capture=True)) == 2
    assert [record.message for record in caplog.records] == [
        "decoding without captured graphs: there are none on a cpu"
    ]


class Counted(tuple):
    hashed = 0

    def __hash__(self) -> int:
        Counted.hashed += 1
        return super().__hash__()


def test_those_that_wait_are_not_hashed_at_each_step():
    """Of a validation that are a thousand prompts; one that comes with the same tokens joins its group."""
    waiting = scheduler.Scheduler(4)
    source = iter([Sequence(Counted((1, 2)), 0, 5), None, None, Sequence(Counted((1, 2)), 1, 5)])
    assert waiting.poll(source)
    hashed = Counted.hashed
    assert waiting.poll(source)
    assert Counted.hashed == hashed
    assert waiting.poll(source)
    assert [len(group.waiting) for group in waiting.groups] == [2]
