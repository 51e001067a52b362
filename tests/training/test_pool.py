"""Completions that workers draw: a run is the same bit for bit without workers, with one or two, with one that is
killed, and when it is resumed; and what an engine holds is what it was sent."""

import contextlib
import json
import os
import pickle
import signal

import pytest
import torch
from transformers import TrainerCallback

from perl.adapters.delivery import base_digest, delivered, digest, from_bytes, put_into, to_bytes
from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError
from perl.config.schema import NoiseConfig
from perl.models.folders import load_model
from perl.records import Completion, Weights
from perl.training.pool import PoolLost, _Background, require_sent
from perl.workers.local import LocalExecutor
from perl.workers.pool import WorkerPool
from perl.workers.rollouts import Drawn, Piece, Version
from perl.workers.worker import EngineJob
from tests.environments.training import fields_of
from tests.tiny import save_tiny, tiny_model
from tests.trainers import SUMS, make_trainer, reward_tokens

NOISE = NoiseConfig(enabled=True, seed=3, sigma_start=0.1, sigma_end=0.01, num_stages=3)
PIECE = 4
DYNAMIC = "algorithm.dynamic_sampling"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), scale=4.0)


def train(
    model,
    folder,
    workers,
    lag,
    *,
    checkpoint=None,
    kill_at=None,
    with_signal=signal.SIGKILL,
    watch=None,
    callback=None,
    rewards=(),
    **settings,
):
    """The trained adapter, and the trainer. Of each batch `watch` gets (position, sample, version, sigma)
    of its rows."""
    steps = []

    def reward(trainer_state, completion_ids, **columns):
        steps.append(trainer_state.global_step)
        if len(steps) == kill_at:
            link = trainer.step.engine._background.pool.workers[0].link
            os.kill(link._process.pid, with_signal)
        return rewards[0](completion_ids=completion_ids, **columns) if rewards else reward_tokens(completion_ids)

    loaded = load_model(model, **settings.pop("load", {}))
    loaded.name_or_path = str(model)
    rollout = {"workers": workers, "lag": lag, "piece_size": PIECE} | settings.pop("rollout", {})
    trainer = make_trainer(
        folder, model=loaded, engine="fast", rollout=rollout, rewards=[reward, *rewards[1:]],
        **({"max_steps": 5, "prompts": SUMS, "noise": NOISE} | settings),
    )  # fmt: skip
    if callback is not None:
        callback.engine = trainer.step.engine
        trainer.add_callback(callback)
    if watch is not None:
        score = trainer.step.collector.rewards.score

        def scored(rows, state, log_metrics=True):
            if rows:
                watch.append([(row.position, row.sample, row.weights.version, row.weights.sigma) for row in rows])
            score(rows, state, log_metrics=log_metrics)

        trainer.step.collector.rewards.score = scored
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        trainer.step.engine.close()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return weights, trainer, steps


@pytest.fixture(scope="module")
def stayed():
    """By their jobs: workers that outlive a run."""
    pools = {}
    yield pools
    for pool in pools.values():
        WorkerPool.__exit__(pool, None)


@pytest.fixture
def workers_stay(stayed, monkeypatch):
    """For the next run that gives them the same job: to start them takes longer than to train."""

    class Staying(WorkerPool):
        def __exit__(self, *_):
            pass

    def open_pool(executor, job, logs, **options):
        alike = executor.workers, pickle.dumps(job)
        return stayed.get(alike) or stayed.setdefault(alike, Staying(executor, job, logs, **options))

    monkeypatch.setattr("perl.training.engines.WorkerPool", open_pool)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_is_the_same_with_workers_and_without(model, tmp_path):
    alone, _, steps = train(model, tmp_path / "alone", 0, 0)
    pooled, trainer, _ = train(model, tmp_path / "pooled", 1, 0)
    assert same(alone, pooled)
    assert steps == [0, 1, 2, 3, 4]  # what reward functions are told
    logged = [row for row in trainer.state.log_history if "pool/staleness" in row]
    assert [row["aqn/sigma_realized"] / row["aqn/sigma"] for row in logged] == pytest.approx([1.0] * 5, rel=0.3)
    assert [row["pool/staleness"] for row in logged] == [0.0] * 5
    assert all(row["rollout/engine_mismatch"] < 1e-5 for row in logged)
    assert all(row["pool/trainer_ms_per_1024_tokens"] > 0 for row in logged)


def test_with_a_lag_it_is_the_same_with_workers_that_are_killed_and_when_it_is_resumed(model, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 3}
    whole, trainer, _ = train(model, tmp_path / "whole", 1, 2, **saved)
    staleness = [row["pool/staleness"] for row in trainer.state.log_history if "pool/staleness" in row]
    assert staleness == [0.0, 1.0, 2.0, 2.0, 2.0]
    killed, trainer, _ = train(model, tmp_path / "killed", 2, 2, kill_at=2, logging_steps=5)
    assert same(whole, killed)
    logged = trainer.state.log_history[0]
    assert (logged["pool/staleness"], logged["pool/staleness_max"]) == (pytest.approx(7 / 5), 2.0)
    assert logged["pool/restarts"] == 1.0  # it was the mean of what the steps before had counted
    assert logged["pool/queue"] == 0.0
    resumed, _, steps = train(model, tmp_path / "whole", 1, 2, checkpoint=str(tmp_path / "whole/checkpoint-3"), **saved)
    assert steps == [3, 4]
    assert same(whole, resumed)


NEWEST = {"max_staleness": 2, "piece_size": None}


def test_what_nobody_has_begun_is_drawn_by_the_newest_policy_and_none_is_older_than_allowed(model, tmp_path):
    """Every prompt in its order, though a worker dies, and what a resumed run had under way is drawn again."""
    saved, seen = {"save_strategy": "steps", "save_steps": 3}, []
    rollout = {"rollout": {**NEWEST, "behaviour": "exact", "importance_correction": "token"}}
    _, trainer, _ = train(model, tmp_path / "run", 2, 0, kill_at=2, watch=seen, **rollout, **saved)
    for step, rows in enumerate(seen):
        assert [row[:2] for row in rows] == [(2 * step + i // 4, i % 4) for i in range(8)]
        assert all(max(0, step - 2) <= version <= step for _, _, version, _ in rows)
    logged = [row for row in trainer.state.log_history if "pool/staleness" in row]
    assert [row["pool/staleness_max"] for row in logged] == [
        step - min(row[2] for row in rows) for step, rows in enumerate(seen)
    ]
    assert all(row["rollout/engine_mismatch"] < 1e-5 and row["pool/workers_draining"] >= 0 for row in logged)
    assert logged[-1]["pool/restarts"] == 1.0
    again: list = []
    checkpoint = str(tmp_path / "run/checkpoint-3")
    train(model, tmp_path / "run", 1, 0, checkpoint=checkpoint, watch=again, **rollout, **saved)
    assert [[row[:2] for row in rows] for rows in again] == [[row[:2] for row in rows] for rows in seen[3:]]
    assert {row[2] for row in again[0]} == {3}


def test_the_newest_policy_is_sent_though_nothing_is_left_to_begin(model, tmp_path, monkeypatch):
    """The last batches were drawn by the policy that the last one of them was begun with."""
    submit, seen = _Background.submit, []

    def seen_submit(background, sent, pieces):
        seen.append((sent.version.weights.version, bool(pieces)))
        submit(background, sent, pieces)

    monkeypatch.setattr(_Background, "submit", seen_submit)
    train(model, tmp_path / "run", 1, 0, rollout=NEWEST, max_steps=4)
    assert seen == [(0, True), (0, True), (0, True), (1, True), (2, False), (3, False)]
    seen.clear()
    train(model, tmp_path / "lagging", 1, 2, max_steps=4)
    assert seen == [(0, True), (0, True), (0, True), (1, True)]


class Validated(TrainerCallback):
    """After each step what a validation does to the engine: the clean policy is published, to score it."""

    def on_step_end(self, args, state, control, **kwargs):
        self.engine.publish(Weights(version=state.global_step))


def test_workers_draw_no_batch_beyond_the_last_one_and_a_steps_batches_by_one_packed_policy(tmp_path, monkeypatch):
    """Two steps of two generation batches each, of two prompts."""
    packs = []
    monkeypatch.setattr("perl.training.pool.to_bytes", lambda *given: packs.append(1) or to_bytes(*given))
    model = save_tiny(tmp_path / "model", scale=4.0)
    window = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    _, trainer, _ = train(model, tmp_path / "run", 1, 1, max_steps=2, num_generations=4, **window)
    assert trainer.step.collector.stream.next == 2 * 2 * 2
    assert len(packs) == 2


def test_where_an_epochs_last_step_is_short_every_batch_has_its_lag_and_none_is_drawn_for_nobody(tmp_path):
    """14 prompts are 14 micro-batches, four a step: 4, 4, 4, 2 and once more. A batch, two prompts, is of two. The last
    one was drawn by the newest weights, and one more was begun."""
    model, seen = save_tiny(tmp_path / "model", scale=4.0), []
    window = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    _, trainer, steps = train(
        model, tmp_path / "run", 1, 1, watch=seen, prompts=SUMS[:14], max_steps=7, num_generations=4, **window
    )
    assert steps == [0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 6]
    assert [{row[2] for row in rows} for rows in seen] == [{version} for version in [0, *steps[:-1]]]
    assert trainer.step.collector.stream.next == 2 * len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 2])
def test_a_validation_leaves_what_the_newest_policy_draws_alone(model, tmp_path, iterations):
    seen, callback = [], Validated()
    train(
        model,
        tmp_path / "run",
        1,
        0,
        watch=seen,
        callback=callback,
        rollout=NEWEST,
        num_iterations=iterations,
        max_steps=6,
    )
    assert len(seen) == 6 // iterations
    assert {row[3] for rows in seen for row in rows} <= {0.1, 0.055, 0.01}  # none is drawn without noise


FOUR_PIECES = {"per_device_train_batch_size": 8, "max_steps": 4}
"""A generation batch of 16 rows."""


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_so_it_is_with_two_and_four_workers(model, tmp_path, lag):
    one, _, _ = train(model, tmp_path / "1", 1, lag, **FOUR_PIECES)
    for workers in (2, 4):
        several, _, _ = train(model, tmp_path / str(workers), workers, lag, **FOUR_PIECES)
        assert same(one, several)


@pytest.mark.slow
@pytest.mark.usefixtures("workers_stay")
@pytest.mark.parametrize("settings", [
    {"rollout": {"importance_correction": "token", "behaviour": "exact"}},
    {"num_iterations": 2},
    {"steps_per_generation": 4},
    {"beta": 0.1, "algorithm": {"name": "rloo"}},
    {"algorithm": {"name": "ppo"}},
    {"algorithm": {"name": "remax"}},
])  # fmt: skip
def test_so_it_is_with_what_keeps_something_from_step_to_step(model, tmp_path, settings):
    saved = {"save_strategy": "steps", "save_steps": 3}
    whole, _, _ = train(model, tmp_path / "whole", 2, 1, **saved, **json.loads(json.dumps(settings)))
    last = str(tmp_path / "whole/checkpoint-3")
    resumed, _, _ = train(model, tmp_path / "whole", 1, 1, checkpoint=last, **saved, **settings)
    assert same(whole, resumed)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_collections", "workers_stay")
@pytest.mark.parametrize("name", [name for name, each in ALGORITHMS.items() if each.settings.get(DYNAMIC) is not True])
def test_so_it_is_with_every_algorithm(model, tmp_path, name):
    one, trainer, _ = train(model, tmp_path / "one", 1, 1, max_steps=3, **fields_of(name))
    two, _, _ = train(model, tmp_path / "two", 2, 1, max_steps=3, **fields_of(name))
    assert same(one, two)
    logged = [row for row in trainer.state.log_history if "pool/staleness" in row]
    assert [row["pool/staleness"] for row in logged] == [0.0, 1.0, 1.0]
    assert max(row["grad_norm"] for row in logged) > 0


@pytest.mark.slow
def test_so_it_is_where_groups_are_chosen_by_their_rewards(model, tmp_path):
    """Some are drawn that no batch has."""
    alone, _, _ = train(model, tmp_path / "alone", 0, 0, **fields_of("dapo"))
    pooled, trainer, _ = train(model, tmp_path / "pooled", 1, 0, **fields_of("dapo"))
    assert same(alone, pooled)
    assert sum(row.get("dapo/resampled_groups", 0) for row in trainer.state.log_history) > 0


@pytest.mark.slow
def test_so_it_is_where_the_noise_is_what_was_measured(model, tmp_path):
    noise = NoiseConfig(enabled=True, seed=3, schedule="target_kl", sigma_start=0.1, num_stages=2)
    alone, _, _ = train(model, tmp_path / "alone", 0, 0, noise=noise)
    pooled, trainer, _ = train(model, tmp_path / "pooled", 1, 0, noise=noise)
    assert same(alone, pooled)
    assert len({row["aqn/sigma"] for row in trainer.state.log_history if "aqn/sigma" in row}) == 5


@pytest.mark.slow
@pytest.mark.usefixtures("workers_stay")
@pytest.mark.parametrize("adapter", ["dora", "ln_tuning"])
def test_so_it_is_with_other_methods_and_a_lag(model, tmp_path, adapter):
    """The trainer computes what an older policy has drawn by its own tensors of it."""
    settings = {"adapter": adapter, "save_strategy": "steps", "save_steps": 3}
    exact = {"importance_correction": "token", "behaviour": "exact"}
    whole, trainer, _ = train(model, tmp_path / "whole", 1, 1, rollout=dict(exact), **settings)
    last = str(tmp_path / "whole/checkpoint-3")
    resumed, _, _ = train(model, tmp_path / "whole", 1, 1, checkpoint=last, rollout=dict(exact), **settings)
    assert same(whole, resumed)
    assert all(row.get("rollout/engine_mismatch", 0.0) < 1e-5 for row in trainer.state.log_history)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["rslora", "dora", "lora_plus", "lora_fa", "vera", "ia3", "ln_tuning", "hra", "oft",
                                     "miss", "adalora", "pissa", "milora", "milora_plus", "none"])  # fmt: skip
def test_so_it_is_with_every_method(model, tmp_path, adapter):
    alone, _, _ = train(model, tmp_path / "alone", 0, 0, adapter=adapter, max_steps=3)
    pooled, _, _ = train(model, tmp_path / "pooled", 1, 0, adapter=adapter, max_steps=3)
    assert same(alone, pooled)


@pytest.mark.slow
def test_the_trainers_own_log_probabilities_are_taken_in_every_batch_without_workers_too(model, tmp_path):
    """They were in the first batch alone."""
    exact = {"importance_correction": "token", "behaviour": "exact"}
    alone, _, _ = train(model, tmp_path / "alone", 0, 0, rollout=exact, max_steps=3)
    pooled, _, _ = train(model, tmp_path / "pooled", 1, 0, rollout=exact, max_steps=3)
    assert same(alone, pooled)


@pytest.mark.slow
def test_a_run_goes_on_with_a_smaller_lag_and_without_workers(model, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 3}
    train(model, tmp_path / "whole", 1, 2, max_steps=5, **saved)
    checkpoint = str(tmp_path / "whole/checkpoint-3")
    _, trainer, steps = train(model, tmp_path / "sync", 1, 0, checkpoint=checkpoint, max_steps=6)
    assert steps == [3, 4, 5]
    staleness = [row["pool/staleness"] for row in trainer.state.log_history if "pool/staleness" in row]
    assert staleness[-3:] == [0.0, 0.0, 0.0]  # what was handed out is drawn again
    _, trainer, steps = train(model, tmp_path / "alone", 0, 0, checkpoint=checkpoint, max_steps=5)
    assert steps == [3, 4]


@pytest.mark.slow
def test_a_worker_that_hangs_costs_its_pieces(model, tmp_path):
    whole, _, _ = train(model, tmp_path / "whole", 1, 1)
    stopped = {"with_signal": signal.SIGSTOP, "rollout": {"deadline_s": 20.0}}
    hung, trainer, _ = train(model, tmp_path / "hung", 1, 1, kill_at=2, **stopped)
    assert same(whole, hung)
    assert trainer.state.log_history[-2]["pool/restarts"] >= 1.0


@pytest.mark.slow
def test_the_last_worker_ends_the_run_with_a_checkpoint_from_which_it_goes_on(model, tmp_path):
    whole, _, _ = train(model, tmp_path / "whole", 1, 1)
    base = save_tiny(tmp_path / "gone", scale=4.0)
    lost = r"all workers died, .*; checkpoint-\d is saved, --config.training.resume_from_checkpoint auto goes on$"
    with pytest.raises(PoolLost, match=lost):
        train(base, tmp_path / "run", 1, 1, kill_at=3, callbacks=[Remove(base, at=2)])
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    ahead = torch.load(checkpoint / "process_state_0.pt")["rollout"]["ahead"]
    own = [batch["weights"]["version"] == int(checkpoint.name[-1]) for batch in ahead]
    assert any(own)
    assert [batch["policy"] is None for batch in ahead] == own
    resumed, _, steps = train(model, tmp_path / "run", 1, 1, checkpoint=str(checkpoint))
    assert steps == list(range(int(checkpoint.name[-1]), 5))
    assert same(whole, resumed)


@pytest.mark.slow
def test_a_run_whose_workers_are_lost_at_an_epochs_first_step_goes_on_with_the_same_random_numbers(tmp_path):
    """Three steps are an epoch; the data loader drew once more."""
    model, base = (save_tiny(tmp_path / name, scale=4.0) for name in ("model", "gone"))
    whole, trainer, _ = train(model, tmp_path / "whole", 1, 0, prompts=SUMS[:6])
    assert trainer.state.epoch == pytest.approx(5 / 3)
    with pytest.raises(PoolLost, match="checkpoint-3 is saved"):
        train(base, tmp_path / "run", 1, 0, kill_at=3, callbacks=[Remove(base, at=2)], prompts=SUMS[:6])
    last = str(tmp_path / "run/checkpoint-3")
    resumed, _, _ = train(model, tmp_path / "run", 1, 0, checkpoint=last, prompts=SUMS[:6])
    assert same(whole, resumed)


def test_a_worker_that_cannot_start_ends_the_run_in_one_line(tmp_path, model):
    why = r"rollout: the engine of worker 0 did not start: .*\(log: .*worker-0\.log\)$"
    with pytest.raises(PoolLost, match=why) as lost:
        train(save_tiny(tmp_path / "gone", scale=4.0), tmp_path / "run", 1, 0,
              callbacks=[Remove(tmp_path / "gone")])  # fmt: skip
    assert lost.value.exit_code == 1  # the run's, not a flag's


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_workers_that_are_lost_amid_a_step_of_two_batches_leave_a_checkpoint_of_the_step_before(tmp_path, lag):
    """Part of the gradient was made, and no checkpoint was saved."""
    model, base = (save_tiny(tmp_path / name, scale=4.0) for name in ("model", "gone"))
    window = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    window |= {"num_generations": 4, "logging_steps": 2}
    whole, trainer, _ = train(model, tmp_path / "whole", 1, lag, **window)
    with pytest.raises(PoolLost, match=r"checkpoint-\d is saved"):  # batch 8 is the second one of step 4
        train(base, tmp_path / "run", 1, lag, kill_at=7, callbacks=[Remove(base, at=1)], **window)
    (last,) = (tmp_path / "run").glob("checkpoint-*")
    made = int(last.name[-1])
    assert made == 3 or lag  # which batch is the first that is not drawn is a matter of time
    assert torch.load(last / "process_state_0.pt")["rollout"]["step"] == 4 * made
    resumed, again, steps = train(model, tmp_path / "run", 1, lag, checkpoint=str(last), **window)
    assert steps == [step for step in range(made, 5) for _ in range(2)]
    assert same(whole, resumed)
    for name in ("loss", "reward", "num_tokens"):
        first, second = ([row[name] for row in each.state.log_history if name in row] for each in (trainer, again))
        assert first == second


def test_workers_that_are_refused_are_the_users_mistake(tmp_path, model, monkeypatch):
    def refuse(*args, **kwargs):
        raise UserError("--config.rollout.executor ray: as Ray's flags are refused")

    monkeypatch.setattr("perl.training.engines.make_executor", refuse)
    with pytest.raises(UserError, match="executor ray: as Ray's flags are refused") as refused:
        train(model, tmp_path / "run", 1, 0)
    assert refused.value.exit_code == 2


def test_workers_that_never_wait_are_shown_idle_before_their_first_piece_alone(tmp_path):
    """Pieces of 3 s, one ends as the next begins, and rows of the log each 2 s: what a piece had of the row before was
    lost, so that every third row said 100 %."""
    background = _Background(WorkerPool(LocalExecutor(1, 1, taken=1), EngineJob("hf", {}), tmp_path))
    shown = []
    for second in range(1, 25):
        if second % 3 == 0:
            background._count(Drawn((), Version("run", Weights(), ""), "", seconds=3.0))
        if second % 2 == 0:
            shown.append(background.take_metrics(2.0)["pool/workers_idle"])
    background.close()
    assert shown == [1.0] + [0.0] * 11


def test_the_queue_and_the_speed_of_each_worker_are_shown(tmp_path):
    """Of a, 300 tokens in 2 + 4 s, and of b 30 in 3 s; nothing of a worker that has finished no piece."""
    background = _Background(WorkerPool(LocalExecutor(2, 1, taken=1), EngineJob("hf", {}), tmp_path))
    background.pool.submit("version", [Piece((0, 0), ()), Piece((0, 1), ())])
    assert background.queued == 2
    for worker, tokens, seconds in (("a", 100, 2.0), ("b", 30, 3.0), ("a", 200, 4.0)):
        drawn = (Completion(token_ids=tuple(range(tokens)), finish_reason="stop"),)
        background._count(Drawn(drawn, Version("run", Weights(), ""), "", seconds, worker=worker))
    shown = [background.take_metrics(10.0) for _ in range(2)]
    names = [f"pool/tokens_per_s{end}" for end in ("", "_min", "_max")]
    assert [shown[0][name] for name in names] == [33.0, 10.0, 50.0]
    background.pool.newest = True  # pieces are drawn at once
    background._count(Drawn((), Version("run", Weights(), ""), "", 3.0, worker="a"))
    assert background.take_metrics(10.0).keys().isdisjoint(names[1:])
    assert shown[1].keys() == shown[0].keys() - {*names[1:]}
    background.close()


class Remove(TrainerCallback):
    """The weights of the model's folder, once they are loaded."""

    def __init__(self, folder, at=0):
        self.folder, self.at = folder, at

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            (self.folder / "model.safetensors").unlink()


# What an engine holds


def policy(seed=0, **peft):
    from peft import get_peft_model

    from perl.adapters import ADAPTERS
    from perl.config.schema import PeftConfig

    wrapped = get_peft_model(tiny_model(seed=seed, scale=4.0), ADAPTERS["lora"].build(PeftConfig(r=4, **peft)))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in delivered(wrapped).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return wrapped


def held(wrapped, norms=()):
    return digest(wrapped, base_digest(wrapped), norms)


def test_the_digest_of_a_base_has_little_of_it_whole_at_a_time(monkeypatch):
    """As ZeRO-3 spreads it: a parameter that is not gathered has no elements."""
    wrapped, asked = policy(), []
    right, largest = base_digest(wrapped), max(parameter.numel() for parameter in wrapped.parameters())
    spread = {id(parameter): (parameter, parameter.data) for parameter in wrapped.parameters()}
    for parameter, data in spread.values():
        parameter.ds_numel = data.numel()
        parameter.data = torch.empty(0)

    @contextlib.contextmanager
    def gathered(parameters):
        asked.append(sum(parameter.ds_numel for parameter in parameters))
        for parameter in parameters:
            parameter.data = spread[id(parameter)][1]
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0)

    monkeypatch.setattr("perl.adapters.delivery.GATHERED", largest + 10)
    assert base_digest(wrapped, gathered) == right
    assert len(asked) > 2
    assert max(asked) <= largest + 10


def test_what_is_delivered_makes_the_same_policy_and_its_digest_names_it():
    sender, engine = policy(), policy()
    with torch.no_grad():
        for tensor in delivered(sender).values():
            tensor.add_(1.0)
    assert held(sender) != held(engine)
    put_into(engine, from_bytes(to_bytes(delivered(sender))))
    assert held(sender) == held(engine)


def test_every_way_in_which_a_policy_can_arrive_wrong_has_another_digest():
    sent = policy(lora_alpha=8)
    right = held(sent)
    tensors = from_bytes(to_bytes(delivered(sent)))
    half = policy(lora_alpha=8)
    with torch.no_grad():
        next(iter(delivered(half).values())).zero_()  # one matrix was not sent
    norms = [("norm", torch.ones(4))]
    digests = {
        "half of it": held(half),
        "another scale": held(policy(lora_alpha=16)),
        "another base": digest(policy(seed=1, lora_alpha=8), base_digest(policy(seed=1)), ()),
        "without its noise": held(policy(lora_alpha=8), norms),
        "other noise": held(policy(lora_alpha=8), [("norm", torch.ones(4) + 1e-6)]),
    }
    assert right not in digests.values()
    assert len(set(digests.values())) == 5
    payload = to_bytes(delivered(sent))
    with pytest.raises(UserError, match="the policy that was sent can't be read"):
        from_bytes(payload[:-10])
    del tensors[next(iter(tensors))]
    with pytest.raises(UserError, match="is another than this engine's, which differs in base_model"):
        put_into(half, tensors)


def test_an_answer_for_another_version_or_of_another_policy_ends_the_run():
    version = Version("run", Weights(version=3, sigma=0.1, draw=0), "a" * 64)
    require_sent(Drawn((), version, "a" * 64, 0.0), version)
    with pytest.raises(PoolLost, match="a worker holds another policy than version 3 that it was sent"):
        require_sent(Drawn((), version, "b" * 64, 0.0), version)
    other = Version("another", Weights(version=3, sigma=0.1, draw=0), "a" * 64)
    with pytest.raises(PoolLost, match="answers for version 3 of run another, asked for version 3 of run run"):
        require_sent(Drawn((), other, "a" * 64, 0.0), version)
