"""The simulated pool: what is handed out when, and what waits for it, by the real queue and order of batches."""

import pytest

from benchmarks.pool_simulation import ADAPTER, simulate


@pytest.mark.parametrize(("lag", "staleness"), [(0, 0), (2, 2), (4, 3)])
def test_a_batch_is_drawn_by_the_policy_that_the_lag_says(lag, staleness):
    """Of four batches; with a lag of four all are handed out at the start. A worker is sent each version that it
    draws with once, and the trainer keeps those that a batch refers to."""
    found = simulate("H100", 2, lag, 4, batch=4)
    assert found["staleness"] == staleness
    versions = max(1, 4 - lag)
    assert found["gb_sent_per_step"] == pytest.approx(versions * 2 * ADAPTER / 4 / 1e9, abs=0.01)
    assert found["kept_gb"] == pytest.approx(min(lag + 1, versions + 1, 4) * ADAPTER / 1e9, abs=0.01)


def test_the_newest_policy_draws_what_is_begun_late():
    """One worker, slower than the trainer, has half a batch at once: what waits in the queue takes the newest policy,
    and is two steps old at most, not four as with a fixed lag. Groups that end by themselves leave it less idle."""
    fixed, newest = (simulate("H100", 1, 4, 6, batch=16, newest=each) for each in (False, True))
    assert fixed["staleness"] == 4
    assert newest["staleness"] == 2
    assert newest["mean_staleness"] < fixed["mean_staleness"]
    assert newest["steps_per_hour"] > fixed["steps_per_hour"]


def test_what_is_drawn_ahead_costs_no_step():
    """Alone, the trainer waits for the longest completion of each batch; ahead of it, for that of the first alone."""
    alone, ahead = (simulate("910B", 4, lag, 4, batch=8)["steps_per_hour"] for lag in (0, 2))
    assert ahead > 1.1 * alone
