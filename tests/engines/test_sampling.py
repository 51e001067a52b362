"""Sampling: values by hand, distributions by chi-square, rows by their own seed alone."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import perl.engines.sampling
from perl.base.errors import UserError
from perl.engines.sampling import NUCLEUS_GUESS, filter_logits, sample, uniforms, validate
from perl.records import Sampling

pytestmark = pytest.mark.numeric


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic; cells of probability 0 must be empty."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum() * probabilities[possible]
    return float(((counts[possible] - expected) ** 2 / expected).sum())


def draw(logits: list[float], sampling: Sampling, rows: int) -> np.ndarray:
    """Counts [vocabulary] of one draw for each of `rows` seeds."""
    uniform = torch.from_numpy(uniforms(np.arange(rows), np.zeros(rows)))
    tokens, _ = sample(torch.tensor(logits).expand(rows, -1), sampling, uniform)
    return np.bincount(tokens.numpy(), minlength=len(logits))


def test_uniforms_are_uniform_and_independent_between_seeds_and_positions():
    seeds, positions = np.divmod(np.arange(200_000), 20)
    values = uniforms(seeds, positions).reshape(10_000, 20)
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert chi_square(counts, np.full(100, 0.01)) < 149  # 99.9 % quantile with 99 degrees of freedom
    for other in (values[1:, :], np.roll(values, 1, axis=1)[1:, :]):  # neighbouring seeds, neighbouring positions
        assert abs(np.corrcoef(values[:-1].ravel(), other.ravel())[0, 1]) < 0.01


def test_uniform_of_a_row_does_not_depend_on_its_neighbours():
    alone = uniforms([2**63 - 5], [7])
    assert uniforms([1, 2**63 - 5, 9], [0, 7, 3])[1] == alone[0]


def test_uniforms_of_all_rows_at_once_are_those_of_lists():
    seeds = [0, 17, 2**63 - 5, 2**64 - 1]
    matrix = uniforms(np.array(seeds, dtype=np.uint64)[:, None], np.arange(300))
    assert (matrix.shape, matrix.dtype) == ((4, 300), np.float32)
    for seed, row in zip(seeds, matrix, strict=True):
        assert row.tolist() == uniforms([seed] * 300, range(300)).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.25, 0.125, 0.125]),
        (Sampling(temperature=0.5), np.array([16, 4, 1, 1]) / 22),
        (Sampling(top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(top_p=0.6), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(top_p=0.5), [1, 0, 0, 0]),
        (Sampling(min_p=0.3), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(top_k=2, top_p=0.6), [1, 0, 0, 0]),  # top-p sees the distribution that top-k left: 2/3, 1/3
        (Sampling(temperature=0), [1, 0, 0, 0]),
    ],
)
def test_drawn_distribution(sampling, expected):
    counts = draw(np.log([0.5, 0.25, 0.125, 0.125]).tolist(), sampling, 50_000)
    assert chi_square(counts, np.array(expected, dtype=float)) < 16.3  # 99.9 % quantile with 3 degrees of freedom


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    logits = torch.tensor([[2.0, 1.5, -1.0]])
    seen = torch.tensor([[True, False, True]])
    tokens, logprobs = sample(logits, Sampling(temperature=0, repetition_penalty=2.0), torch.zeros(1), seen=seen)
    assert tokens.item() == 1
    assert logprobs.item() == pytest.approx(1.5 - np.log(np.exp([2.0, 1.5, -1.0]).sum()), abs=1e-6)


def test_logprobs_are_those_of_the_temperature_before_truncation():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    tokens, logprobs = sample(logits, Sampling(temperature=0.5, top_k=1), torch.tensor([0.9]))
    assert tokens.item() == 0
    assert logprobs.item() == pytest.approx(np.log(0.25 / 0.375), abs=1e-6)


def test_logprobs_are_the_models_own_where_a_processor_changed_the_logits():
    model_logits = torch.log(torch.tensor([[0.75, 0.25]]))
    forced = torch.tensor([[float("-inf"), 0.0]])
    tokens, logprobs = sample(forced, Sampling(), torch.tensor([0.1]), model_logits=model_logits)
    assert tokens.item() == 1
    assert logprobs.item() == pytest.approx(np.log(0.25), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.05, 3.0])  # flat: the nucleus is larger than the first guess
def test_truncation_keeps_the_tokens_that_transformers_keeps(seed, spread):
    sampling = Sampling(top_k=4000, top_p=0.9, min_p=0.001)
    torch.manual_seed(seed)
    logits = torch.randn(5, 4 * NUCLEUS_GUESS) * spread
    for mine, theirs in [
        (sampling, [TopKLogitsWarper(4000), TopPLogitsWarper(0.9), MinPLogitsWarper(0.001)]),
        (Sampling(top_p=0.95), [TopPLogitsWarper(0.95)]),
        (Sampling(top_k=7), [TopKLogitsWarper(7)]),
    ]:
        expected = LogitsProcessorList(theirs)(None, logits).isfinite()
        kept = filter_logits(logits, mine).isfinite()
        assert (kept != expected).sum() <= 1  # a token at the edge of the nucleus, where the two sums round apart
        assert kept.any(dim=-1).all()


def test_penalty_is_that_of_transformers():
    torch.manual_seed(0)
    logits, ids = torch.randn(3, 50), torch.randint(50, (3, 9))
    seen = torch.zeros(3, 50, dtype=torch.bool).scatter(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone()).argmax(dim=-1)
    tokens, _ = sample(logits, Sampling(temperature=0, repetition_penalty=1.3), torch.zeros(3), seen=seen)
    assert torch.equal(tokens, expected)


def test_row_does_not_depend_on_batch_or_order():
    torch.manual_seed(1)
    logits, seeds = torch.randn(64, 5000), np.arange(64) * 7919
    sampling = Sampling(temperature=0.8, top_p=0.9)
    tokens, logprobs = sample(logits, sampling, torch.from_numpy(uniforms(seeds, np.full(64, 3))))
    order = torch.randperm(64)
    for rows in (order[:1], order[:13], order):
        some, some_logprobs = sample(logits[rows], sampling, torch.from_numpy(uniforms(seeds[rows], [3] * len(rows))))
        assert torch.equal(some, tokens[rows])
        assert torch.equal(some_logprobs, logprobs[rows])


def test_largest_and_smallest_uniform_stay_inside_the_distribution():
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]])
    assert sample(logits, Sampling(), torch.tensor([0.0]))[0].item() == 1
    assert sample(logits, Sampling(), torch.tensor([1 - 2.0**-24]))[0].item() == 2


def test_impossible_values_are_user_errors():
    validate(Sampling())
    with pytest.raises(UserError, match=r"top_p: 0\.0 is not possible; write a value above 0"):
        validate(Sampling(top_p=0.0))
    with pytest.raises(UserError, match="temperature: -1"):
        validate(Sampling(temperature=-1))


def test_a_cpu_draws_from_few_rows_at_once_what_it_draws_from_all(monkeypatch):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    uniform = torch.from_numpy(uniforms(np.arange(7), np.full(7, 3)))
    seen = torch.arange(50) % 3 == torch.arange(7)[:, None] % 3
    sampling = Sampling(temperature=0.7, top_k=20, repetition_penalty=1.3)
    whole = sample(logits, sampling, uniform, seen=seen, model_logits=2 * logits)
    monkeypatch.setattr(perl.engines.sampling, "CPU_NUMBERS", 3 * 50)
    parts = sample(logits, sampling, uniform, seen=seen, model_logits=2 * logits)
    assert torch.equal(parts[0], whole[0])
    torch.testing.assert_close(parts[1], whole[1])
