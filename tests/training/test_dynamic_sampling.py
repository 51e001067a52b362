"""Groups of equal rewards are replaced by further prompts: which, at what cost, and again the same."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from perl.base.errors import UserError
from perl.config.load import parse
from perl.prompts import row_seed
from perl.training import dynamic_sampling
from perl.training.dynamic_sampling import Collection, Hooks, Judged
from perl.training.preflight import check_dynamic_sampling
from perl.training.rollout import RolloutRequest, Weights
from tests.trainers import make_trainer, question, reward_tokens

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


def by_hand(equal: str, needed: int, most: int = 100, grade_early=None) -> Collection:
    """Groups of two; the letter at a position says whether its group is equal, "e", or not, "u"."""

    def judge(row, token_ids):
        second = 1.0 if row["letter"] == "e" else 0.0
        return Judged(torch.tensor([[1.0], [second]]), {"place": [row["place"]] * 2})

    hooks = Hooks(
        row=lambda position: {"letter": equal[position], "place": position},
        tokenize=lambda row: [row["place"]],
        grade_early=grade_early,
        judge=judge,
    )
    numbers: dict[str, Any] = {"needed": needed, "most": most, "size": 2, "seed": 0, "equal_by": None}
    return Collection(iter(range(len(equal))), hooks, **numbers, weights=torch.ones(1))


def places(groups) -> list[int]:
    return [group.row["place"] for group in groups]


def run(collection: Collection, order: random.Random) -> None:
    """Draw and grade in a random order, as a decode loop and a slow grader may."""
    asked = drawn = 0
    waiting: list[int] = []
    while True:
        new = len(collection.more())
        waiting += range(asked, asked + new)
        asked += new
        if not waiting:
            return
        collection.finished(waiting.pop(order.randrange(len(waiting))), [drawn])
        drawn += 1


@pytest.mark.parametrize(
    ("equal", "needed", "most", "drawn", "chosen"),
    [
        ("uuuu", 2, 100, [0, 1], [0, 1]),
        ("eueeuu", 2, 100, [0, 1, 2, 3, 4], [1, 4]),
        ("eeueuu", 3, 100, [0, 1, 2, 3, 4, 5], [2, 4, 5]),
        ("eueeuu", 2, 4, [0, 1, 2, 3], [0, 1]),  # the limit: the first equal one fills the batch
        ("eeeeee", 2, 4, [0, 1, 2, 3], [0, 1]),
        ("eeu", 2, 100, [0, 1, 2], [0, 2]),  # the last epoch's end
    ],
)
@pytest.mark.parametrize("order", range(4))
def test_the_first_groups_that_hold_enough_unequal_ones(equal, needed, most, drawn, chosen, order):
    collection = by_hand(equal, needed, most)
    run(collection, random.Random(order))
    assert places(collection.groups) == drawn
    assert places(collection.chosen()) == chosen


def test_a_prompt_is_asked_for_only_when_one_before_it_was_found_equal():
    """Drawing never waits for a grade; without anything to draw it does."""
    grades: list[Future] = []

    def grade_early(token_ids, row):
        grades.append(Future())
        return grades[-1]

    collection = by_hand("eue", 2, grade_early=grade_early)
    assert collection.more() == [([0], s) for s in collection.groups[0].seeds] + [
        ([1], s) for s in collection.groups[1].seeds
    ]
    collection.finished(0, [7])
    collection.finished(1, [7])
    assert collection.more() == []  # its grades are not there; the other group is drawn on
    grades[0].set_result(None)
    assert collection.more() == []
    grades[1].set_result(None)
    assert [prompt for prompt, _ in collection.more()] == [[2], [2]]
    for place in range(2, 6):
        collection.finished(place, [7])
    for late, grade in enumerate(grades[2:]):
        threading.Timer(0.02 * late, grade.set_result, [None]).start()
    assert collection.more() == []  # waits: nothing is drawn
    assert [group.equal for group in collection.groups] == [True, False, True]


def test_seeds_are_the_prompts_place_in_the_stream():
    collection = by_hand("eu", 1)
    run(collection, random.Random(0))
    assert [group.seeds for group in collection.groups] == [
        [row_seed(0, f"stream-{place}", index) for index in range(2)] for place in range(2)
    ]


@pytest.mark.parametrize(("equal_by", "equal"), [(0, True), (1, False), (None, False)])
def test_what_must_differ(equal_by, equal):
    """Equal accuracy, unequal punishments: DAPO's paper asks for the accuracy."""
    rewards = Judged(torch.tensor([[1.0, 0.0], [1.0, -0.5]]), {})
    hooks = Hooks(row=lambda p: {}, tokenize=lambda row: [1], grade_early=None, judge=lambda row, ids: rewards)
    numbers = {"needed": 1, "most": 1, "size": 2, "seed": 0}
    collection = Collection(itertools.count(), hooks, **numbers, equal_by=equal_by, weights=torch.ones(2))
    run(collection, random.Random(0))
    assert [group.equal for group in collection.groups] == [equal]


def test_a_group_without_the_reward_that_is_asked_for_is_judged_by_the_sum():
    nan = float("nan")
    rewards = Judged(torch.tensor([[nan, 0.0], [nan, -0.5]]), {})
    hooks = Hooks(row=lambda p: {}, tokenize=lambda row: [1], grade_early=None, judge=lambda row, ids: rewards)
    numbers = {"needed": 1, "most": 1, "size": 2, "seed": 0}
    collection = Collection(itertools.count(), hooks, **numbers, equal_by=0, weights=torch.ones(2))
    run(collection, random.Random(0))
    assert [group.equal for group in collection.groups] == [False]


def test_a_group_whose_rewards_are_not_finite_is_kept_for_the_trainer_to_see():
    rewards = Judged(torch.tensor([[float("inf"), 0.0], [float("inf"), 0.0]]), {})
    hooks = Hooks(row=lambda p: {}, tokenize=lambda row: [1], grade_early=None, judge=lambda row, ids: rewards)
    numbers = {"needed": 1, "most": 1, "size": 2, "seed": 0}
    collection = Collection(itertools.count(), hooks, **numbers, equal_by=0, weights=torch.ones(2))
    run(collection, random.Random(0))
    assert [group.equal for group in collection.groups] == [False]


# Trainings


class Seen:
    """Everything that a trainer's rollouts asked for and chose."""

    def __init__(self, trainer):
        self.positions: list[int] = []
        self.chosen: list[list[list[int]]] = []
        self.tokens = 0
        stream, collect, complete = trainer.dynamic_sampling.stream, trainer._collect, trainer.sampler.complete
        row = stream.row

        def watched_row(position):
            self.positions.append(position)
            return row(position)

        def watched_collect(dynamic):
            found = collect(dynamic)
            self.chosen.append([list(ids) for ids in found.completions.token_ids])
            return found

        def watched_complete(request):
            found = complete(request)
            self.tokens += sum(map(len, found.token_ids))
            return found

        stream.row, trainer._collect = watched_row, watched_collect
        trainer.sampler.complete = watched_complete


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
    """Full batches of unequal groups, and at most 1.1 times the tokens that the first rollout needs: those of the
    shortest beginning of the stream that fills the batch, drawn here by themselves."""
    trainer = make_trainer(
        tmp_path, engine="fast", algorithm=DAPO, rewards=[mostly_equal], prompts=PROMPTS, max_steps=1
    )
    rows = [trainer.train_dataset[trainer.dynamic_sampling.stream.row(p)] for p in range(40)]
    ids = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
    request = RolloutRequest(
        prompt_ids=[prompt for prompt in ids for _ in range(4)],
        seeds=[row_seed(11, f"stream-{p}", k) for p in range(40) for k in range(4)],
        sampling=trainer._sampling(),
        weights=Weights(0, 0, 0.0),
        group_size=4,
    )
    drawn = trainer.sampler.complete(request).token_ids
    unequal = [p for p in range(40) if number_of(rows[p]["prompt"]) % 10 >= 7]
    needed = sum(len(tokens) for tokens in drawn[: 4 * (unequal[1] + 1)])
    seen = Seen(trainer)
    trainer.train()
    assert seen.chosen == [[drawn[4 * p + k] for p in unequal[:2] for k in range(4)]]
    assert needed <= seen.tokens <= 1.1 * needed
    used = sum(map(len, seen.chosen[0]))
    assert logged(trainer, "dapo/rollout_tokens_per_used_token") == [pytest.approx(needed / used, rel=1e-6)]
    assert logged(trainer, "dapo/resampled_groups") == [unequal[1] + 1 - 2]
    assert logged(trainer, "frac_reward_zero_std") == [0.0]
    assert logged(trainer, "update/rows_left_out") == [0.0]


def test_the_epochs_end_the_training_and_no_prompt_is_lost(tmp_path):
    """Two epochs of forty prompts hold 24 unequal groups: eleven or twelve batches of two, not the forty that
    transformers counts."""
    trainer, seen = train(tmp_path, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    assert sorted(seen.positions) == seen.positions == list(range(len(seen.positions)))
    assert len(seen.positions) >= 79
    assert trainer.state.global_step == trainer.state.max_steps == len(seen.chosen) in (12, 13)
    assert all(len(chosen) == 8 for chosen in seen.chosen)
    assert logged(trainer, "dapo/kept_equal_groups")[:-1] == [0.0] * (len(seen.chosen) - 1)
    assert logged(trainer, "epoch")[-1] == len(seen.positions) / 40
    rows = [PROMPTS.index(trainer.train_dataset[trainer.dynamic_sampling.stream.row(p)]["prompt"]) for p in range(40)]
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
    dynamic_sampling.warn_once.cache_clear()
    trainer, seen = train(tmp_path, algorithm=limited, rewards=[all_equal], engine=engine)
    assert [len(chosen) for chosen in seen.chosen] == [8, 8]
    assert seen.positions == list(range(12))
    assert logged(trainer, "dapo/kept_equal_groups") == [2.0, 2.0]
    assert logged(trainer, "dapo/resampled_groups") == [4.0, 4.0]
    assert logged(trainer, "loss") == [0.0, 0.0]
    assert sum("the limit is reached" in line.message for line in caplog.records) == 1


def test_samplers_that_take_no_more_prompts_draw_in_rounds(tmp_path):
    trainer, seen = train(tmp_path, engine="generate", max_steps=4)
    assert [len(chosen) for chosen in seen.chosen] == [8] * 4
    assert logged(trainer, "frac_reward_zero_std") == [0.0] * 4
    assert seen.positions == list(range(len(seen.positions)))


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
            trainer.grade_early = SlowGrader(seed)
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
        asked.append(prompts[0][-1]["content"])
        log_extra("question", [prompt[-1]["content"] for prompt in prompts])
        log_metric("dear/calls", len(completions))
        if number_of(prompts[0]) % 2:
            return [1.0] * len(completions)
        return [spoken.random() for _ in completions]

    trainer, seen = train(tmp_path, rewards=[dear], max_steps=1, log_completions=True)
    assert len(asked) == len(set(asked)) == len(seen.positions) > 2
    questions = list(trainer._logs["extra"]["question"])
    assert len(questions) == 8
    assert all(int(text.split()[2]) % 2 == 0 for text in questions)
    assert logged(trainer, "dear/calls") == [4.0]


async def late(completion_ids, prompts, **kwargs):
    return mostly_equal(completion_ids, prompts)


def test_a_users_asynchronous_reward(tmp_path):
    chosen = [train(tmp_path, rewards=[reward], max_steps=1)[1].chosen for reward in (late, mostly_equal)]
    assert chosen[0] == chosen[1]


# Two processes


def main() -> None:
    """One rank of two: python -m tests.training.test_dynamic_sampling FOLDER SETTINGS [SETTINGS …]."""
    folder = Path(sys.argv[1])
    for number, settings in enumerate(sys.argv[2:]):
        trainer, seen = train(folder / f"run{number}", **json.loads(settings))
        found = {
            "positions": seen.positions,
            "chosen": [len(chosen) for chosen in seen.chosen],
            "left_out": logged(trainer, "update/rows_left_out"),
            "resampled": logged(trainer, "dapo/resampled_groups"),
            "stream": trainer.dynamic_sampling.stream.state(),
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
    drawn = sorted(ranks[0]["positions"] + ranks[1]["positions"])
    stream = ranks[0]["stream"]
    assert sorted(drawn + stream["skipped"]) == list(range(stream["next"]))
    assert ranks[0]["left_out"] == [0.0] * steps
    assert sum(ranks[0]["resampled"]) == len(drawn) - 4 * steps


def ranks_of(folder: Path, number: int = 0) -> list[dict]:
    return [json.loads((folder / f"rank{rank}_{number}.json").read_text()) for rank in range(2)]


def test_two_ranks_fill_their_parts_of_the_batch(tmp_path):
    """In one run of the decode loop each, and in rounds together."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(ROOT / "scripts/accelerate/cpu.yaml"), "--num_processes", "2", "-m"]
    engines = [{"max_steps": 3, "engine": engine} for engine in ("fast", "generate")]
    words = ["tests.training.test_dynamic_sampling", str(tmp_path), *map(json.dumps, engines)]
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
    assert parsed.warnings == ["--config.algorithm.dynamic_sampling False goes before algorithm dapo, which sets True"]


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
        check_dynamic_sampling(parse([*flags, "--config.training.per_device_train_batch_size", "1"]).build(4).training)
    check_dynamic_sampling(parse([*flags, "--config.training.gradient_accumulation_steps", "4"]).build(1).training)


def test_a_training_by_epochs_ends_between_steps():
    """The prompts of one step would be used up in its second rollout, and the run would end without its adapter."""
    words = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
    flags = [word for name, value in words.items() for word in (f"--config.training.{name}", str(value))]
    epochs = [*flags, "--config.training.max_steps", "-1", "--config.training.steps_per_generation"]
    with pytest.raises(UserError, match=r"steps_per_generation 2 x num_iterations 1 is no multiple of .*_steps 4; "):
        check_dynamic_sampling(parse([*epochs, "2"]).build(1).training)
    check_dynamic_sampling(parse([*epochs, "2", "--config.training.num_iterations", "2"]).build(1).training)
    check_dynamic_sampling(parse([*epochs, "8"]).build(1).training)
    check_dynamic_sampling(parse([*epochs, "2", "--config.training.max_steps", "9"]).build(1).training)


if __name__ == "__main__":
    main()
