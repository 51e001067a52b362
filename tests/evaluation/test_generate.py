from types import SimpleNamespace

import pytest

from perl.config.evaluation import EvalConfig
from perl.config.schema import EnvironmentConfig
from perl.evaluation.generate import needed_context
from perl.records import Sampling


@pytest.mark.parametrize("allowed", [None, 4096])
def test_an_environments_reset_may_add_to_a_prompt(allowed):
    environment = EnvironmentConfig(factory="games.py:Game")
    config = EvalConfig(model="m", dataset="d", environment=environment)
    samples = [SimpleNamespace(token_ids=[0] * 200, sampling=Sampling(max_new_tokens=512))]
    assert needed_context(SimpleNamespace(config=config, context=allowed), samples) == (allowed or 712)


@pytest.mark.parametrize(
    ("use_vllm", "allowed", "context"),
    [
        (False, None, 712),
        (True, None, 1024),  # another longest prompt, the same length: vLLM finds what it compiled the last time
        (True, 4096, 1024),
        (True, 800, 800),
        (False, 700, 700),
    ],
)
def test_context_is_what_the_rows_need(use_vllm, allowed, context):
    setup = SimpleNamespace(config=EvalConfig(model="m", dataset="d", use_vllm=use_vllm), context=allowed)
    sampling = Sampling(max_new_tokens=512)
    samples = [SimpleNamespace(token_ids=[0] * length, sampling=sampling) for length in (150, 200, 3)]
    assert needed_context(setup, samples) == context
