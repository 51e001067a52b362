"""Seeds and sampling of the fast rollout."""

from transformers import GenerationConfig

from perl.records import Sampling
from perl.training.rollout import rollout_seeds, sampling_of


def test_seeds_do_not_depend_on_the_number_of_ranks():
    one = rollout_seeds(7, (3, 0), rows=8, rank=0, group_size=4)
    two = [seed for rank in (0, 1) for seed in rollout_seeds(7, (3, 0), rows=4, rank=rank, group_size=4)]
    four = [seed for rank in range(4) for seed in rollout_seeds(7, (3, 0), rows=2, rank=rank, group_size=4)]
    assert one == two == four


def test_every_row_rollout_and_run_has_its_own_seeds():
    drawn = [
        *rollout_seeds(7, (3, 0), rows=8, rank=0, group_size=4),
        *rollout_seeds(7, (3, 1), rows=8, rank=0, group_size=4),
        *rollout_seeds(7, (4, 0), rows=8, rank=0, group_size=4),
        *rollout_seeds(8, (3, 0), rows=8, rank=0, group_size=4),
    ]
    assert len(set(drawn)) == 32


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
