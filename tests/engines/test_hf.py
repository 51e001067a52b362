"""The transformers backend on a model folder as a user has it."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from perl.base.errors import UserError
from perl.engines import ENGINES
from perl.engines.hf import HFEngine
from perl.prompts import decode
from perl.records import Prompt, Sampling
from tests.engines.models import completions, prompts
from tests.tiny import save_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), scale=4.0)


def ask(count: int) -> list[Prompt]:
    vocabulary = len(tiny_tokenizer())
    return [
        Prompt(token_ids=tuple(token % vocabulary for token in ids), seed=index)
        for index, ids in enumerate(prompts(count))
    ]


def complete(engine, asked, sampling):
    found = completions(engine, asked, sampling)
    assert sorted(found) == list(range(len(asked)))
    return [found[index] for index in range(len(asked))]


def test_completions_are_those_of_greedy_generate(folder):
    engine = ENGINES["hf"](str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = tiny_tokenizer()
    asked = ask(20)
    reasons = set()
    for prompt, completion in zip(
        asked, complete(engine, asked, Sampling(temperature=0, max_new_tokens=16)), strict=True
    ):
        ids = torch.tensor([prompt.token_ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        expected = expected[0, ids.shape[1] :].tolist()
        stopped = expected[-1] == tokenizer.eos_token_id
        assert list(completion.token_ids) == expected
        assert list(completion.content_ids) == (expected[:-1] if stopped else expected)
        assert len(completion.logprobs) == len(expected)
        assert completion.finish_reason == ("stop" if stopped else "length")
        plain = tokenizer.decode(completion.content_ids, skip_special_tokens=True)
        assert decode(engine.processing, completion.content_ids) == plain
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}
    engine.close()
    engine.close()


def test_sampled_row_does_not_depend_on_company_order_or_batch_budget(folder):
    asked, sampling = ask(30), Sampling(temperature=0.9, top_p=0.95, max_new_tokens=12)
    together = complete(HFEngine(str(folder)), asked, sampling)
    assert complete(HFEngine(str(folder), max_batch_tokens=100), asked[::-1], sampling)[::-1] == together
    assert complete(HFEngine(str(folder)), asked[7:8], sampling) == together[7:8]


def test_ends_at_every_eos_of_the_generation_config_and_the_tokenizer(folder, tmp_path):
    save_tiny(tmp_path, scale=4.0)
    asked, sampling = ask(10), Sampling(temperature=0, max_new_tokens=12)
    before = complete(HFEngine(str(folder)), asked, sampling)
    stop = next(completion.token_ids[3] for completion in before if len(completion.token_ids) > 3)
    GenerationConfig(eos_token_id=[stop]).save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path))
    assert engine.eos_token_ids == {stop, tiny_tokenizer().eos_token_id}
    for old, new in zip(before, complete(engine, asked, sampling), strict=True):
        cut = old.token_ids.index(stop) if stop in old.token_ids else len(old.token_ids)
        assert new.token_ids == old.token_ids[: cut + 1]
        assert new.content_ids == old.content_ids[:cut]
        assert new.finish_reason == ("stop" if stop in old.token_ids else old.finish_reason)


def test_sampling_defaults_of_the_models_generation_config_are_not_taken(folder, tmp_path):
    save_tiny(tmp_path, scale=4.0)
    GenerationConfig(do_sample=True, temperature=0.1, top_k=1, repetition_penalty=5.0).save_pretrained(tmp_path)
    asked, sampling = ask(10), Sampling(max_new_tokens=8)
    assert complete(HFEngine(str(tmp_path)), asked, sampling) == complete(HFEngine(str(folder)), asked, sampling)


def test_completion_ends_where_the_context_does(folder):
    engine = HFEngine(str(folder), max_model_len=20)
    asked = [Prompt(token_ids=(7,) * 15, seed=0), Prompt(token_ids=(7,) * 3, seed=1)]
    engine.eos_token_ids = frozenset()
    long, short = complete(engine, asked, Sampling(max_new_tokens=8))
    assert (len(long.token_ids), len(short.token_ids)) == (5, 8)
    with pytest.raises(UserError, match="a prompt has 20 tokens, and the context holds 20"):
        complete(engine, [asked[0], Prompt(token_ids=(7,) * 20, seed=0)], Sampling())
    with pytest.raises(UserError, match="a prompt is empty"):
        complete(engine, [Prompt(token_ids=(), seed=0)], Sampling())


def test_model_that_the_fast_loop_cannot_serve_falls_back_and_says_so(tmp_path, caplog):
    save_tiny(tmp_path, family="mistral", sliding_window=8)
    engine, asked = HFEngine(str(tmp_path), max_batch_tokens=120), ask(12)
    sampling = Sampling(max_new_tokens=10)
    with caplog.at_level(logging.WARNING):
        together = complete(engine, asked, sampling)
        assert complete(engine, asked[::-1], sampling)[::-1] == together
    lines = [record.getMessage() for record in caplog.records if record.name == "perl.base.errors"]
    assert lines == [
        "decoding with the model's own generate, as the decode loop can't serve it:"
        " its cache has DynamicSlidingWindowLayer"
    ]


def test_dtype(folder, tmp_path):
    assert HFEngine(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16
    save_tiny(tmp_path, dtype=torch.bfloat16)
    assert HFEngine(str(tmp_path)).model.dtype == torch.float32  # auto, on a CPU


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float31"}, "--dtype: unknown dtype 'float31'; did you mean 'float32'?"),
        ({"tp_size": 2}, "--tp_size 2: the transformers backend keeps a model on one device"),
        ({"max_model_len": 513}, r"--max_model_len 513: .* takes 2 to 512 tokens"),
        ({"max_batch_tokens": 0}, "max_batch_tokens: 0 is not possible"),
    ],
)
def test_wrong_options_are_user_errors(folder, options, message):
    with pytest.raises(UserError, match=message):
        HFEngine(str(folder), **options)


def test_wrong_model_folders_are_user_errors(folder, tmp_path):
    with pytest.raises(UserError, match=r"no config.json in this folder; name the folder that holds a whole model"):
        HFEngine(str(tmp_path))
    with pytest.raises(UserError, match=r"/no/such/model: cannot be loaded as a causal language model"):
        HFEngine("/no/such/model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(UserError, match="cannot be loaded as a causal language model"):
        HFEngine(str(tmp_path))
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded as a causal language model"):
        HFEngine(str(tmp_path))
    with pytest.raises(UserError, match="top_p: 2 is not possible"):
        complete(HFEngine(str(folder)), ask(1), Sampling(top_p=2))


def test_a_stream_takes_rows_while_others_are_under_way(folder):
    """Row 0 is long; each further row comes only when the one before has ended, and all end before row 0 does."""
    engine = HFEngine(str(folder), max_batch_tokens=200)
    engine.eos_token_ids = frozenset()
    asked = ask(6)
    lengths = [60, 4, 4, 4, 4, 4]
    samplings = [Sampling(max_new_tokens=length) for length in lengths]
    order = []

    def feed():
        yield replace(asked[0], sampling=samplings[0])
        for index in range(1, 6):
            yield replace(asked[index], sampling=samplings[index])
            while index not in order:
                yield None
        while 0 not in order:
            yield None

    got = {}
    for position, completion in engine.stream(feed()):
        order.append(position)
        got[position] = completion
    assert order == [1, 2, 3, 4, 5, 0]
    for index, sampling in enumerate(samplings):
        assert [got[index]] == complete(engine, asked[index : index + 1], sampling)


def test_a_stream_of_several_distributions_gives_each_row_its_own(folder):
    engine, asked = HFEngine(str(folder), max_batch_tokens=300), ask(9)
    kinds = [Sampling(temperature=0, max_new_tokens=8), Sampling(temperature=0.7, max_new_tokens=12)]
    mixed = [replace(prompt, sampling=kinds[index // 3 % 2]) for index, prompt in enumerate(asked)]
    got = dict(engine.stream(iter(mixed)))
    assert sorted(got) == list(range(9))
    for index, prompt in enumerate(mixed):
        assert [got[index]] == complete(engine, [asked[index]], prompt.sampling)
