"""Groups of equal rewards are replaced by further prompts: which, at what cost, and again the same."""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perl.base.errors import RankError, UserError, say_once
from perl.config.load import parse
from perl.records import Completion, Sampling, Trajectory, Weights, row_seed
from perl.rewards.score import Rewards
from perl.training.batch import Batch
from perl.training.collect import Collector, ReadPrompt, to_draw
from perl.training.preflight import require_whole_groups
from perl.training.stream import PromptStream
from tests.trainers import kept_batches, make_trainer, question, reward_tokens, tokens_of

ROOT = Path(__file__).parents[2]
DAPO = {"dynamic_sampling": True}
PROMPTS = [question(f"What is {i} ?") for i in range(40)]


def number_of(prompt) -> int:
    return int(prompt[-1]["content"].split()[2])


def mostly_equal(completion_ids, prompts, **kwargs):
    """Seven groups of ten have equal rewards."""
    rewards = reward_tokens(completion_ids)
    return [1.0 if number_of(p) % 10 < 7 else r for p, r in zip(prompts, rewards, strict=True)]


def all_equal(completions, **kwargs):
    return [1.0] * len(completions)


# A collection by hand


class Engine:
    """Completes every prompt with its only token."""

    remote = False

    def __init__(self):
        self.rounds: list[list[int]] = []
        self.seeds: dict[int, list[int]] = {}
        """Of each prompt's completions."""

    def stream(self, prompts):
        self.rounds.append([prompt.token_ids[0] for prompt in prompts])
        for place, prompt in enumerate(prompts):
            self.seeds.setdefault(prompt.token_ids[0], []).append(prompt.seed)
            yield place, Completion(token_ids=prompt.token_ids, logprobs=(-1.0,), finish_reason="stop")


class Alone:
    """One process of one."""

    rank, count = 0, 1
    gathered = staticmethod(list)
    added_up = staticmethod(list)


class Clock:
    def __call__(self, phase):
        return contextlib.nullcontext()

    def __init__(self):
        self.forwards: list[Any] = []

    def count_forward(self, work):
        self.forwards.append(work)


def by_hand(equal: str, needed: int, factor: float = 100.0, share: float = 0.0, processes: Any = None) -> Collector:
    """Groups of two; the letter at a position says whether its group is equal, "e", or not, "u"."""

    def reward(prompts, **columns):
        places = [int(prompt) for prompt in prompts]
        return [1.0 if equal[p] == "e" or n % 2 else 0.0 for n, p in enumerate(places)]

    stream = PromptStream(len(equal), 1, seed=0, epochs=1, shuffle=False)
    stream.equal_share = share
    return Collector(
        stream=stream,
        rows=[{"prompt": str(place)} for place in range(len(equal))],
        read=lambda row: ReadPrompt((int(row["prompt"]),)),
        text=str,
        engine=Engine(),  # type: ignore[arg-type]
        sampling=Sampling(),
        rewards=Rewards([reward], ["reward"], torch.ones(1)),
        grade_early=None,
        batch=needed,
        group_size=2,
        processes=processes or Alone(),
        clock=Clock(),  # type: ignore[arg-type]
        state=lambda: None,
        max_resample_factor=factor,
    )


def positions_of(rows) -> list[int]:
    return [row.position for row in rows if row.sample == 0]


@pytest.mark.parametrize(
    ("equal", "needed", "factor", "share", "rounds", "chosen", "following"),
    [
        ("uuuuuu", 2, 100, 0.0, [[0, 1]], [0, 1], 2),
        ("eueeuuuuuu", 2, 100, 0.0, [[0, 1], [2, 3, 4, 5, 6, 7]], [1, 4], 5),  # half of the first round was equal
        ("eueeuuuu", 2, 100, 0.75, [[0, 1, 2, 3, 4, 5, 6, 7]], [1, 4], 5),  # known from before: one round
        ("eueeuu", 2, 2, 0.0, [[0, 1], [2, 3]], [0, 1], 4),  # the limit: the first equal one fills the batch
        ("eeeeee", 2, 2, 0.0, [[0, 1], [2, 3]], [0, 1], 4),
        ("eeu", 2, 100, 0.0, [[0, 1], [2]], [0, 2], 3),  # the last epoch's end
    ],
)
def test_the_first_groups_that_are_unequal(equal, needed, factor, share, rounds, chosen, following):
    """Whatever is drawn at once, the same are chosen; what lies behind the last of them is drawn again."""
    say_once.cache_clear()
    collector = by_hand(equal, needed, factor, share)
    rows, metrics = collector.collect(Weights())
    assert [one[::2] for one in collector.engine.rounds] == rounds
    assert positions_of(rows) == chosen
    assert collector.stream.next == following
    drawn = sum(map(len, rounds))
    assert metrics["dapo/resampled_groups"] == drawn - needed
    assert metrics["dapo/returned_groups"] == drawn - (chosen[-1] + 1)
    assert metrics["dapo/kept_equal_groups"] == sum(equal[place] == "e" for place in chosen)
    assert metrics["dapo/rollout_tokens_per_used_token"] == drawn / needed


def test_so_many_are_drawn_that_a_second_round_is_rare():
    assert [to_draw(8, share) for share in (0.0, 0.3, 0.7, 1.0)] == [8, 16, 42, 132]
    letters = random.Random(3)
    collector = by_hand("".join(letters.choices("eu", [0.7, 0.3], k=9000)), 16)
    rounds = []
    for step in range(80):
        before = len(collector.engine.rounds)
        _, metrics = collector.collect(Weights(version=step))
        rounds.append(len(collector.engine.rounds) - before)
        assert metrics["dapo/returned_groups"] < 70
    assert max(rounds[1:]) == 2  # the first rollout knows no share
    assert sum(rounds[1:]) / 79 < 1.15
    assert collector.stream.equal_share == pytest.approx(0.7, abs=0.1)


def test_what_went_back_is_drawn_again_with_the_same_seeds():
    collector = by_hand("eueeuuuu", 2, share=0.75)
    first, _ = collector.collect(Weights())
    again, _ = collector.collect(Weights(version=1))
    assert positions_of(again) == [5, 6]
    assert collector.stream.next == 7
    assert {row.weights.version for row in again} == {1}
    assert positions_of(first) == [1, 4]
    seeds = {place: [row_seed(0, f"stream-{place}", sample) for sample in range(2)] for place in range(8)}
    drawn = collector.engine.seeds
    assert [drawn[place] for place in range(5)] == [seeds[place] for place in range(5)]
    assert [drawn[place] for place in (5, 6)] == [seeds[place] * 2 for place in (5, 6)]


class Both:
    """Two processes, one thread each, that wait for each other."""

    def __init__(self):
        self.barrier, self.said = threading.Barrier(2), [None, None]

    def of(self, rank: int) -> Any:
        def gathered(things):
            self.said[rank] = list(things)
            self.barrier.wait(10)
            everything = self.said[0] + self.said[1]
            self.barrier.wait(10)
            return everything

        def added_up(numbers):
            everything = gathered([numbers])
            return [sum(pair) for pair in zip(*everything, strict=True)]

        return SimpleNamespace(rank=rank, count=2, gathered=gathered, added_up=added_up)


@pytest.mark.parametrize("equal", ["eueueueuuuuuuuuu", "uuuuuuuuuuuuuuuu", "ueueueueuuuuuuuu", "eeeeeeeeeeeeeeee"])
def test_two_processes_train_on_what_one_would(equal):
    """All unequal groups may have been drawn by one of them: it hands over what it has too many of."""
    say_once.cache_clear()
    alone = by_hand(equal, 4, factor=4.0)
    expected = positions_of(alone.collect(Weights())[0])
    both = Both()
    collectors = [by_hand(equal, 4, factor=4.0, processes=both.of(rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda collector: collector.collect(Weights()), collectors))
    parts = [positions_of(rows) for rows, _ in found]
    assert [len(part) for part in parts] == [2, 2]
    assert sorted(parts[0] + parts[1]) == expected
    assert all(row.rewards and row.token_ids == [row.position] for rows, _ in found for row in rows)
    assert {collector.stream.next for collector in collectors} == {alone.stream.next}
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(("equal_by", "equal"), [(0, True), (1, False), (None, False)])
def test_what_must_differ(equal_by, equal):
    """Equal accuracy, unequal punishments: DAPO's paper asks for the accuracy."""
    assert judged([[1.0, 0.0], [1.0, -0.5]], equal_by) is equal


def judged(rewards, equal_by) -> bool:
    collector = by_hand("u", 1)
    collector.equal_by = equal_by
    collector.rewards = Rewards([print, print], ["a", "b"], torch.ones(2))
    return collector.is_equal([SimpleNamespace(rewards=row) for row in rewards])  # type: ignore[arg-type]


def test_a_group_without_the_reward_that_is_asked_for_is_judged_by_the_sum():
    nan = float("nan")
    assert judged([[nan, 0.0], [nan, -0.5]], 0) is False
    assert judged([[nan, -0.5], [nan, -0.5]], 0) is True


def test_too_few_values_of_a_reward_functions_column_are_one_line():
    def reward(completions, log_extra, **_):
        log_extra("question", ["of the first"])
        return [1.0] * len(completions)

    rows = [Trajectory(row={"prompt": "a"}, position=0, sample=i, prompt_ids=(1,), completion="b") for i in range(2)]
    with pytest.raises(RankError, match="log_extra\\('question', …\\) got 1 values for 2 completions"):
        Rewards([reward], ["reward"], torch.ones(1)).score(rows, None)


@pytest.mark.parametrize("known", [[True, False], [False, True], [False, True, False], [False, False]])
def test_log_probabilities_stay_with_their_tokens(known):
    """Of a turn whose engine gives none they are NaN."""
    row = Trajectory(row={}, position=0, sample=0, prompt_ids=(1,))
    for turn, given in enumerate(known):
        row.add(Completion(token_ids=(turn, turn), logprobs=(-1.0, -2.0) if given else (), finish_reason="stop"))
    expected = [logprob if given else math.nan for given in known for logprob in (-1.0, -2.0)]
    assert row.logprobs == pytest.approx(expected if any(known) else [], nan_ok=True)
    other = Trajectory(row={}, position=0, sample=1, prompt_ids=(1,), token_ids=[3], logprobs=[-3.0], sampled=[True])
    batch = Batch.of([row, other], torch.device("cpu"), False, len(row.token_ids), logprobs=True)
    assert batch.sampler[0].isnan().tolist() == [not given for given in known for _ in range(2)]


def test_a_reward_that_is_infinite_in_float32_is_named():
    """As the advantages are, which are made of it."""
    row = Trajectory(
        row={"prompt": "1 + 1"}, position=0, sample=0, prompt_ids=(1,), completion="2", rewards=[0.5, 1e39]
    )
    (named,) = Rewards([print, print], ["a", "b"], torch.ones(2)).infinite([row])
    assert named == "b on completion 0 (prompt '1 + 1', completion '2')"


def test_a_group_whose_rewards_are_not_finite_is_kept_for_the_trainer_to_see():
    assert judged([[float("inf"), 0.0], [float("inf"), 0.0]], 0) is False


def test_what_was_drawn_ahead_is_drawn_again_where_groups_are_chosen_now(caplog):
    """Its policy is older than what dynamic sampling may choose from."""
    caplog.set_level("INFO")
    collector = by_hand("uuuuuu", 2)
    collector.stream.next = 4
    collector.go_on_with([{"first": 2, "weights": asdict(Weights(version=1))}])
    assert "2 prompts that were drawn ahead are drawn again, by newer weights" in caplog.text
    assert not collector.ahead
    rows, _ = collector.collect(Weights(version=3))
    assert positions_of(rows) == [2, 3]


def test_what_was_drawn_ahead_is_drawn_again_where_the_lag_is_smaller_now(caplog):
    """It was trained on all the same, uncorrected with a lag of 0."""
    caplog.set_level("INFO")
    collector = by_hand("uuuuuu", 2)
    collector.max_resample_factor = None
    collector.engine.publish_again = lambda weights, state: True  # type: ignore[method-assign]
    for lag, most, next_ in ((2, 1, 2), (2, 2, 4), (0, 0, 4)):
        collector.stream.next, collector.batches_ahead = 4, most
        collector.ahead.clear()
        collector.go_on_with([{"first": 2, "weights": asdict(Weights(version=1)), "lag": lag}])
        assert (collector.stream.next, len(collector.ahead)) == (next_, int(next_ == 4))
    assert caplog.text.count("2 prompts that were drawn ahead are drawn again, by newer weights") == 1


@pytest.mark.parametrize(("remote", "forwards"), [(False, 1), (True, 0)])
def test_the_flops_of_workers_are_not_the_trainers(remote, forwards):
    collector = by_hand("uu", 2)
    collector.engine.remote = remote
    collector.collect(Weights(version=0))
    assert len(collector.clock.forwards) == forwards  # type: ignore[attr-defined]


# Trainings


class Seen:
    """Everything that a trainer's rollouts asked for and chose."""

    def __init__(self, trainer):
        self.positions: list[int] = []
        self.tokens = 0
        self.batches = kept_batches(trainer)
        stream, engine = trainer.step.collector.stream, trainer.step.collector.engine
        row, draw = stream.row, engine.stream

        def watched_row(position):
            self.positions.append(position)
            return row(position)

        def watched_stream(feed):
            for place, completion in draw(feed):
                self.tokens += len(completion.token_ids)
                yield place, completion

        stream.row = watched_row
        engine.stream = watched_stream

    @property
    def chosen(self) -> list[list[list[int]]]:
        return [tokens_of(batch) for batch in self.batches]


def adapter_of(trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def logged(trainer, name) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def train(folder, **settings):
    defaults = {"engine": "fast", "algorithm": DAPO, "rewards": [mostly_equal], "prompts": PROMPTS}
    resume = settings.pop("resume", None)
    trainer = make_trainer(folder, **(defaults | settings))
    seen = Seen(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen


def test_seventy_percent_equal(tmp_path):
    """Full batches of unequal groups, the first of the stream; what was drawn behind them comes again."""
    trainer, seen = train(tmp_path, max_steps=4)
    stream = trainer.step.collector.stream
    unequal = [p for p in range(60) if number_of(trainer.train_dataset[stream.row(p)]["prompt"]) % 10 >= 7]
    assert [positions_of(batch.rows) for batch in seen.batches] == [unequal[2 * i : 2 * i + 2] for i in range(4)]
    assert stream.next == unequal[7] + 1
    used = sum(len(ids) for chosen in seen.chosen for ids in chosen)
    costs = logged(trainer, "dapo/rollout_tokens_per_used_token")
    assert sum(c * sum(map(len, chosen)) for c, chosen in zip(costs, seen.chosen, strict=True)) == pytest.approx(
        seen.tokens
    )
    assert seen.tokens > used
    assert logged(trainer, "frac_reward_zero_std") == [0.0] * 4
    assert logged(trainer, "update/rows_left_out") == [0.0] * 4


def test_the_epochs_end_the_training_and_no_prompt_is_lost(tmp_path):
    """Two epochs of forty prompts hold 24 unequal groups: eleven or twelve batches of two, not the forty that
    transformers counts."""
    trainer, seen = train(tmp_path, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    stream = trainer.step.collector.stream
    assert set(seen.positions) == set(range(stream.next))
    assert stream.next >= 79
    assert trainer.state.global_step == trainer.state.max_steps == len(seen.chosen) in (12, 13)
    assert all(len(chosen) == 8 for chosen in seen.chosen)
    assert logged(trainer, "dapo/kept_equal_groups")[:-1] == [0.0] * (len(seen.chosen) - 1)
    assert logged(trainer, "epoch")[-1] == stream.next / 40
    rows = [PROMPTS.index(trainer.train_dataset[stream.row(p)]["prompt"]) for p in range(40)]
    assert sorted(rows) == list(range(40))


def test_a_finished_run_that_is_resumed_ends_with_its_adapter(tmp_path):
    trainer, _ = train(tmp_path, max_steps=-1, num_train_epochs=1, save_strategy="steps", save_steps=100)
    last = tmp_path / f"checkpoint-{trainer.state.global_step}"
    assert last.is_dir()  # the last step's, as with max_steps
    again, rest = train(tmp_path / "again", max_steps=-1, num_train_epochs=1, resume=str(last))
    assert rest.chosen == []
    assert again.state.global_step == again.state.max_steps == trainer.state.global_step
    mine, theirs = adapter_of(again), adapter_of(trainer)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_nothing_left_to_draw_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"num_train_epochs: 1 prompts are left of its epochs, .* takes 2"):
        train(tmp_path, max_steps=-1, num_train_epochs=0.02)


@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_at_the_limit_equal_groups_fill_the_batch(tmp_path, engine, caplog):
    """Nothing but equal groups: every rollout draws three times its batch, and ends."""
    limited = {"dynamic_sampling": True, "max_resample_factor": 3.0}
    say_once.cache_clear()
    trainer, seen = train(tmp_path, algorithm=limited, rewards=[all_equal], engine=engine)
    assert [len(chosen) for chosen in seen.chosen] == [8, 8]
    assert seen.positions == list(range(12))
    assert logged(trainer, "dapo/kept_equal_groups") == [2.0, 2.0]
    assert logged(trainer, "dapo/resampled_groups") == [4.0, 4.0]
    assert logged(trainer, "loss") == [0.0, 0.0]
    assert sum("the limit is reached" in line.message for line in caplog.records) == 1


def test_the_models_own_generate_draws_too(tmp_path):
    trainer, seen = train(tmp_path, engine="generate", max_steps=4)
    assert [len(chosen) for chosen in seen.chosen] == [8] * 4
    assert logged(trainer, "frac_reward_zero_std") == [0.0] * 4


class SlowGrader:
    """Grades after a random time; the rewards are judged when all of a group's are there."""

    def __init__(self, seed):
        self.random, self.pool = random.Random(seed), ThreadPoolExecutor(4)

    def __call__(self, text, row):
        return self.pool.submit(time.sleep, self.random.choice([0.0, 0.002, 0.03]))


def test_how_long_grading_takes_changes_nothing(tmp_path):
    """Bit for bit, whichever group is decided first."""
    found = []
    for seed in (None, 1, 2):
        trainer = make_trainer(
            tmp_path, engine="fast", algorithm=DAPO, rewards=[mostly_equal], prompts=PROMPTS, max_steps=3
        )
        seen = Seen(trainer)
        if seed is not None:
            trainer.step.collector.grade_early = SlowGrader(seed)
        trainer.train()
        found.append((seen.chosen, seen.positions, adapter_of(trainer), logged(trainer, "loss")))
    for chosen, positions, adapter, losses in found[1:]:
        assert (chosen, positions, losses) == (found[0][0], found[0][1], found[0][3])
        assert all(torch.equal(adapter[name], tensor) for name, tensor in found[0][2].items())


@pytest.mark.parametrize("window", [1, 2])
def test_a_resumed_run_is_the_same_run(tmp_path, window):
    """Six steps against four and two from the checkpoint; `window` 2: its rollout is still to be used."""
    settings = {"max_steps": 6, "save_strategy": "steps", "gradient_accumulation_steps": 2}
    settings |= {"steps_per_generation": 2 * window, "lr_scheduler_type": "constant"}
    whole, seen = train(tmp_path / "whole", **settings, save_steps=3)
    again, rest = train(tmp_path / "again", **settings, save_steps=100, resume=str(tmp_path / "whole/checkpoint-3"))
    count = len(rest.chosen)
    assert count == (3 if window == 1 else 1)
    assert rest.chosen == seen.chosen[-count:]
    assert rest.positions == seen.positions[-len(rest.positions) :]
    assert logged(again, "loss")[-3:] == logged(whole, "loss")[-3:]
    mine, theirs = adapter_of(again), adapter_of(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_each_group_is_rewarded_once_and_columns_are_those_of_the_batch(tmp_path):
    """A user's function may be random, or cost something: TRL is given what it said, and logs its columns."""
    asked: list[str] = []
    spoken = random.Random(0)

    def dear(completions, prompts, log_extra, log_metric, trainer_state, **kwargs):
        questions = [prompt[-1]["content"] for prompt in prompts]
        asked.extend(questions)
        log_extra("question", questions)
        log_metric("dear/rows", len(completions))
        return [1.0 if number_of(prompt) % 2 else spoken.random() for prompt in prompts]

    trainer, seen = train(tmp_path, rewards=[dear], max_steps=1, log_completions=True)
    assert len(asked) == 4 * len(set(asked)) == 4 * len(seen.positions) > 8
    questions = list(trainer._logs["extra"]["question"])
    assert len(questions) == 8
    assert all(int(text.split()[2]) % 2 == 0 for text in questions)
    assert logged(trainer, "dear/rows")[0] % 4 == 0


async def late(completion_ids, prompts, **kwargs):
    return mostly_equal(completion_ids, prompts)


def test_a_users_asynchronous_reward(tmp_path):
    chosen = [train(tmp_path, rewards=[reward], max_steps=1)[1].chosen for reward in (late, mostly_equal)]
    assert chosen[0] == chosen[1]


# Two processes


def main() -> None:
    """One rank of two: python -m tests.training.test_collect FOLDER SETTINGS [SETTINGS …]."""
    folder = Path(sys.argv[1])
    for number, settings in enumerate(sys.argv[2:]):
        trainer, seen = train(folder / f"run{number}", **json.loads(settings))
        found = {
            "positions": seen.positions,
            "chosen": [len(chosen) for chosen in seen.chosen],
            "left_out": logged(trainer, "update/rows_left_out"),
            "resampled": logged(trainer, "dapo/resampled_groups"),
            "stream": trainer.step.collector.stream.state(),
            "steps": trainer.state.global_step,
            "device": str(trainer.accelerator.device),
        }
        rank = trainer.accelerator.process_index
        (folder / f"rank{rank}_{number}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def check_ranks(ranks: list[dict], steps: int) -> None:
    """Both have full batches, share the stream's prompts out, and agree on what is left."""
    assert [rank["steps"] for rank in ranks] == [steps, steps]
    assert [rank["chosen"] for rank in ranks] == [[8] * steps] * 2
    assert ranks[0]["stream"] == ranks[1]["stream"]
    drawn = ranks[0]["positions"] + ranks[1]["positions"]
    assert set(drawn) >= set(range(ranks[0]["stream"]["next"]))
    assert ranks[0]["left_out"] == [0.0] * steps
    assert sum(ranks[0]["resampled"]) == len(drawn) - 4 * steps


def ranks_of(folder: Path, number: int = 0) -> list[dict]:
    return [json.loads((folder / f"rank{rank}_{number}.json").read_text()) for rank in range(2)]


def test_two_ranks_fill_their_parts_of_the_batch(tmp_path):
    """In one run of the decode loop each, and in rounds together."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(ROOT / "scripts/accelerate/cpu.yaml"), "--num_processes", "2", "-m"]
    engines = [{"max_steps": 3, "engine": engine} for engine in ("fast", "generate")]
    words = ["tests.training.test_collect", str(tmp_path), *map(json.dumps, engines)]
    done = subprocess.run([*launch, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for number in range(2):
        check_ranks(ranks_of(tmp_path, number), 3)


# Flags


def test_dapo_samples_dynamically_unless_told_otherwise():
    assert parse(["--config.algorithm.name", "dapo"]).values.algorithm.dynamic_sampling is True
    assert parse([]).values.algorithm.dynamic_sampling is False
    parsed = parse(["--config.algorithm.name", "dapo", "--config.algorithm.dynamic_sampling", "false"])
    assert parsed.values.algorithm.dynamic_sampling is False
    assert parsed.warnings == ["--config.algorithm.dynamic_sampling False overrides algorithm dapo, which sets True"]


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("max_resample_factor", "0.5", "max_resample_factor 0.5: a batch has to be drawn once; write a number from 1"),
        ("dynamic_sampling_metric", "acc", "no such reward; write one of accuracy, overlong, sum"),
    ],
)
def test_values_that_no_rollout_can_heed(flag, value, said):
    with pytest.raises(UserError, match=said):
        parse(["--config.algorithm.name", "dapo", f"--config.algorithm.{flag}", value])


def test_a_group_of_one_has_nothing_that_could_differ():
    words = ["--config.algorithm.name", "ppo", "--config.algorithm.dynamic_sampling", "true"]
    with pytest.raises(UserError, match=r"dynamic_sampling true: one completion .*num_generations 2 or more"):
        parse(words)
    assert parse([*words, "--config.training.num_generations", "4"]).values.algorithm.dynamic_sampling is True


def test_flags_without_dynamic_sampling():
    parsed = parse(["--config.algorithm.max_resample_factor", "3", "--config.algorithm.dynamic_sampling_metric", "sum"])
    assert [line.partition(" has no")[0] for line in parsed.warnings] == [
        "--config.algorithm.dynamic_sampling_metric",
        "--config.algorithm.max_resample_factor",
    ]


def test_a_process_without_whole_groups():
    words = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_generations": 4}
    flags = [word for name, value in words.items() for word in (f"--config.training.{name}", str(value))]
    with pytest.raises(UserError, match=r"3 completions of a process .* no whole groups of 4"):
        require_whole_groups(parse([*flags, "--config.training.per_device_train_batch_size", "1"]).build(4).training)
    require_whole_groups(parse([*flags, "--config.training.gradient_accumulation_steps", "4"]).build(1).training)


def test_a_training_by_epochs_ends_between_steps():
    """The prompts of one step would be used up in its second rollout, and the run would end without its adapter."""
    words = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
    flags = [word for name, value in words.items() for word in (f"--config.training.{name}", str(value))]
    epochs = [*flags, "--config.training.max_steps", "-1", "--config.training.steps_per_generation"]
    with pytest.raises(UserError, match=r"steps_per_generation 2 x num_iterations 1 is no multiple of .*_steps 4; "):
        require_whole_groups(parse([*epochs, "2"]).build(1).training)
    require_whole_groups(parse([*epochs, "2", "--config.training.num_iterations", "2"]).build(1).training)
    require_whole_groups(parse([*epochs, "8"]).build(1).training)
    require_whole_groups(parse([*epochs, "2", "--config.training.max_steps", "9"]).build(1).training)


if __name__ == "__main__":
    main()
