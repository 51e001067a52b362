"""The trainer's entry: a model in training completes a generation batch."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MistralConfig, MistralForCausalLM

from perl.engines.base import warn_once
from perl.engines.decode import generate_completions
from perl.errors import UserError
from perl.records import Sampling
from tests.engines.models import SHAPE, prompts, tiny

SAMPLING = Sampling(max_new_tokens=12)


def complete(model, prompt_ids, group_size, seeds, sampling=SAMPLING, **options):
    return generate_completions(
        model, prompt_ids, group_size, sampling, seeds, eos_token_ids=[2], pad_token_id=0, **options
    )


def test_groups_and_repeated_prompts_are_the_same_rows_in_the_callers_order():
    model, prompt_ids = tiny(), prompts(6)
    grouped = complete(model, prompt_ids, 4, range(24))
    assert [finished.index for finished in grouped] == list(range(24))
    repeated = [prompt for prompt in prompt_ids for _ in range(4)]
    assert complete(model, repeated, 1, range(24)) == grouped
    assert len({tuple(finished.token_ids) for finished in grouped[:4]}) > 1
    alone = complete(model, prompt_ids[2:3], 1, [9])[0]
    assert alone.token_ids == grouped[9].token_ids


@pytest.mark.parametrize("sliding_window", [None, 8])
def test_model_in_training_samples_without_dropout_and_keeps_its_flags(sliding_window):
    torch.manual_seed(0)
    base = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=sliding_window, attention_dropout=0.5))
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.eval()
    expected = complete(model, prompts(5), 2, range(10))
    model.train()
    base.model.norm.eval()
    assert complete(model, prompts(5), 2, range(10)) == expected
    assert {name for name, module in model.named_modules() if not module.training} == {"base_model.model.model.norm"}
    assert torch.is_grad_enabled()
    loss = model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss
    loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_flags_come_back_after_an_exception():
    model = tiny().train()

    def fail(prompt_ids, scores):
        assert not model.training
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        complete(model, prompts(2), 1, range(2), processors=[fail])
    assert all(module.training for module in model.modules())


def test_all_is_computed_inside_generate(monkeypatch):
    model = tiny()
    plain = model.generate

    def generate(*args, **kwargs):
        with torch.no_grad():
            model.lm_head.weight.neg_()
        try:
            return plain(*args, **kwargs)
        finally:
            with torch.no_grad():
                model.lm_head.weight.neg_()

    expected_otherwise = complete(model, prompts(5), 2, range(10))
    monkeypatch.setattr(model, "generate", generate)
    inside = complete(model, prompts(5), 2, range(10))
    monkeypatch.undo()
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert complete(model, prompts(5), 2, range(10)) == inside != expected_otherwise


def test_fallback_is_said_once(caplog):
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="perl.engines.base"):
        first = complete(model, prompts(5), 1, range(5), max_batch_tokens=50)
        assert [f.token_ids for f in complete(model, prompts(5), 1, range(5))] == [f.token_ids for f in first]
    assert len(caplog.records) == 1


def test_wrong_arguments():
    with pytest.raises(ValueError, match="5 seeds for 2 prompts of 2 completions each"):
        complete(tiny(), prompts(2), 2, range(5))
    with pytest.raises(UserError, match="min_p: 1 is not possible"):
        complete(tiny(), prompts(2), 1, range(2), Sampling(min_p=1))
