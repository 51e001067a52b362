"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): groups of equal rewards are replaced by further prompts.

Each process fills its own part of the generation batch:

    PromptStream         which prompts, in which order
    Collection.admit     one further prompt for each group found equal   -> the decode loop, while others are drawn
    Collection.finished  a completion has ended: its grading starts
    Collection.decide    all of a group are graded: rewards, equal or not
    Collection.chosen    the groups with unequal rewards, and their cost

Which groups are chosen depends on the prompts' order alone, not on how long drawing and grading take: a prompt is
drawn only when as many before it were found equal as it needs to be asked for, so that the groups drawn are the first
n of the process's share, with n the smallest that holds enough unequal ones. Nothing is drawn in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback
from trl.data_utils import is_conversational

from perl.base.errors import UserError
from perl.engines.base import warn_once
from perl.prompts import row_seed
from perl.rewards.functions import logged_name
from perl.training.loss import equal_rewards
from perl.training.prompt_stream import PromptStream
from perl.training.rollout import Completions, RolloutRequest, Sampler

log = logging.getLogger(__name__)


class Judged(NamedTuple):
    """What the reward functions say of one group."""

    rewards: torch.Tensor
    """float32 [completions, functions], NaN where a function gave none."""
    extras: dict[str, list[Any]]
    """Columns that they logged of each completion."""


@dataclass(slots=True, eq=False)
class Group:
    """A prompt and its completions."""

    row: dict[str, Any]
    """Of the data set."""
    prompt_ids: list[int]
    seeds: list[int]
    """One for each completion."""
    token_ids: list[list[int]]
    """Of each completion; empty until it has ended."""
    logprobs: list[list[float]] = field(default_factory=list)
    grading: list[Future[Any]] = field(default_factory=list)
    """What `judged` would have to wait for."""
    judged: Judged | None = None
    equal: bool = False
    """Whether its rewards are."""

    def ready(self) -> bool:
        """Whether it can be judged without waiting."""
        return all(self.token_ids) and all(grade.done() for grade in self.grading)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a Collection has done by the trainer."""

    row: Callable[[int], dict[str, Any]]
    """The row of the data set at a position of the stream."""
    tokenize: Callable[[dict[str, Any]], list[int]]
    """Its prompt."""
    grade_early: Callable[[list[int], dict[str, Any]], Future[Any] | None] | None
    """Starts to grade a completion (perl.rewards.functions.GradeEarly), given its tokens."""
    judge: Callable[[dict[str, Any], list[list[int]]], Judged]
    """The rewards of a group's completions, given their tokens. Once for each group."""


class Collection:
    """The groups of one rollout on this process.

    Args:
        positions: of the prompts, in their order.
        needed: groups that fill this process's part of the batch.
        most: groups that it may draw.
        size: completions of each prompt.
        seed: the run's.
        equal_by: the reward function that is asked whether a group is equal; None: the sum by `weights`.
        weights: float [functions], of the reward functions.
    """

    def __init__(
        self,
        positions: Iterator[int],
        hooks: Hooks,
        *,
        needed: int,
        most: int,
        size: int,
        seed: int,
        equal_by: int | None,
        weights: torch.Tensor,
    ):
        self.positions, self.hooks = positions, hooks
        self.needed, self.most, self.size, self.seed = needed, most, size, seed
        self.equal_by, self.weights = equal_by, weights.cpu()
        self.groups: list[Group] = []
        """All that were drawn, in the order of their prompts."""
        self._undecided: list[Group] = []
        self._drawing = 0
        self._found_equal = 0

    def admit(self) -> list[Group]:
        """The prompts to draw now: as many as the groups that are not equal, or not known to be, leave to be filled."""
        admitted: list[Group] = []
        while len(self.groups) - self._found_equal < self.needed and len(self.groups) < self.most:
            position = next(self.positions, None)
            if position is None:  # of the last epoch
                break
            row = self.hooks.row(position)
            seeds = [row_seed(self.seed, f"stream-{position}", place) for place in range(self.size)]
            group = Group(row, self.hooks.tokenize(row), seeds, [[] for _ in seeds])
            admitted.append(group)
            self.groups.append(group)
        self._undecided += admitted
        self._drawing += len(admitted) * self.size
        return admitted

    def more(self) -> list[tuple[list[int], int]]:
        """`RolloutRequest.more`: decides what can be decided, and waits for grades only while nothing is drawn."""
        while True:
            self.decide()
            if (admitted := self.admit()) or self._drawing or not self._undecided:
                return [(group.prompt_ids, seed) for group in admitted for seed in group.seeds]
            pending = [grade for group in self._undecided for grade in group.grading if not grade.done()]
            wait(pending, return_when=FIRST_COMPLETED)

    def finished(self, place: int, token_ids: list[int]) -> None:
        """The completion `place` of all that were drawn has ended."""
        group, index = self.groups[place // self.size], place % self.size
        group.token_ids[index] = token_ids
        self._drawing -= 1
        if self.hooks.grade_early is not None:
            grade = self.hooks.grade_early(token_ids, group.row)
            group.grading += [] if grade is None else [grade]

    def decide(self, now: bool = False) -> None:
        """Judge the groups that are ready; `now`: all of them."""
        for group in self._undecided:
            if now or group.ready():
                group.judged = self.hooks.judge(group.row, group.token_ids)
                group.equal = self._is_equal(group.judged.rewards)
                self._found_equal += group.equal
        self._undecided = [group for group in self._undecided if group.judged is None]

    def _is_equal(self, rewards: torch.Tensor) -> bool:
        """By the function that is asked, or where it gives this group no reward, by the sum. What is not
        finite is the trainer's to see."""
        if rewards.isinf().any():
            return False
        asked = self.equal_by
        if asked is None or rewards[:, asked].isnan().all():
            return bool(equal_rewards(rewards, self.weights, self.size).all())
        return bool(equal_rewards(rewards[:, [asked]], torch.ones(1), self.size).all())

    def chosen(self) -> list[Group]:
        """`needed` groups in the order of their prompts: the unequal ones, and where these are too few the first equal
        ones."""
        unequal = sum(not group.equal for group in self.groups)
        spare = self.needed - unequal
        chosen = []
        for group in self.groups:
            if not group.equal or spare > 0:
                chosen.append(group)
                spare -= group.equal
        return chosen


def draw(
    collection: Collection, sampler: Sampler, request: RolloutRequest, largest: Callable[[int], int]
) -> tuple[int, dict[str, float]]:
    """Fill `collection` by `sampler`; the tokens drawn, and what the sampler measured.

    In one run of a sampler that takes more prompts as it draws; else in rounds, each of what is missing after the one
    before. Processes then ask equally often for as many prompts: one that lacks fewer repeats one, for nothing.

    Args:
        request: without prompts.
        largest: from a number of this process to the largest of all.
    """
    size, tokens, metrics = collection.size, 0, {}
    if sampler.takes_more:
        found = sampler.complete(replace(request, more=collection.more, on_finished=collection.finished))
        for place, logprobs in enumerate(found.logprobs):
            collection.groups[place // size].logprobs.append(logprobs)
        return sum(map(len, found.token_ids)), found.metrics
    while count := largest(len(admitted := collection.admit())):
        asked = admitted + [collection.groups[0]] * (count - len(admitted))
        first = (len(collection.groups) - len(admitted)) * size
        found = sampler.complete(
            replace(
                request,
                prompt_ids=[group.prompt_ids for group in asked for _ in group.seeds],
                seeds=[seed for group in asked for seed in group.seeds],
            )
        )
        tokens, metrics = tokens + sum(map(len, found.token_ids)), found.metrics
        for place in range(len(admitted) * size):
            admitted[place // size].logprobs.append(found.logprobs[place])
            collection.finished(first + place, found.token_ids[place])
        collection.decide(now=True)
    return tokens, metrics


def compared_reward(asked: str | None, names: Sequence[str]) -> int | None:
    """Which of the reward functions `names` must differ within a group; None: the weighted sum of all.

    Args:
        asked: algorithm.dynamic_sampling_metric.
    """
    if asked is None:
        return names.index("accuracy") if "accuracy" in names else None
    return None if asked == "sum" else names.index(logged_name(asked))


def as_batch(row: dict[str, Any], token_ids: list[list[int]], tokenizer: Any) -> tuple[list[Any], ...]:
    """What TRL's `_calculate_rewards` takes of a group: rows, prompts, completions and their tokens."""
    count = len(token_ids)
    texts: list[Any] = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    if is_conversational({"prompt": row["prompt"]}):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    return [row] * count, [row["prompt"]] * count, texts, token_ids


class Collected(NamedTuple):
    """What a rollout with dynamic sampling gives to TRL: the chosen rows of this process."""

    rows: list[dict[str, Any]]
    """Of the data set, one for each completion."""
    prompt_ids: list[list[int]]
    seeds: list[int]
    completions: Completions
    rewards: torch.Tensor
    """float32 [rows, functions]."""
    extras: dict[str, list[Any]]
    """Columns that the reward functions logged, [rows] each."""
    drawn: list[int]
    """Tokens of each sequence that was drawn, chosen or not, prompts included."""


def collected(collection: Collection, metrics: dict[str, float]) -> Collected:
    groups = collection.chosen()
    judged = [group.judged for group in groups if group.judged is not None]
    columns = dict.fromkeys(name for one in judged for name in one.extras)
    size = len(groups[0].seeds)
    return Collected(
        rows=[group.row for group in groups for _ in group.seeds],
        prompt_ids=[group.prompt_ids for group in groups for _ in group.seeds],
        seeds=[seed for group in groups for seed in group.seeds],
        completions=Completions(
            [ids for group in groups for ids in group.token_ids],
            [logprobs for group in groups for logprobs in group.logprobs],
            metrics,
        ),
        rewards=torch.cat([one.rewards for one in judged]),
        extras={name: [x for one in judged for x in one.extras.get(name, [None] * size)] for name in columns},
        drawn=[len(group.prompt_ids) + len(ids) for group in collection.groups for ids in group.token_ids],
    )


class Cost(NamedTuple):
    """Of a rollout: sums that are exchanged as float32."""

    drawn: float
    """Groups."""
    kept_equal: float
    """Groups of the batch whose rewards are equal, as there was nothing left to replace them by."""
    tokens: float
    """Of completions, all that were drawn."""
    used: float
    """Those of the batch."""
    reward: float
    """Sum of all completions' rewards."""
    rewarded: float
    """Completions that have one."""

    @classmethod
    def of(cls, collection: Collection, chosen: Sequence[Group], tokens: int, weights: torch.Tensor) -> Cost:
        """
        Args:
            tokens: drawn.
            weights: of the reward functions.
        """
        rewards = torch.cat([group.judged.rewards for group in collection.groups if group.judged is not None])
        known = ~rewards.isnan().all(dim=1)
        return cls(
            drawn=len(collection.groups),
            kept_equal=sum(group.equal for group in chosen),
            tokens=tokens,
            used=sum(len(ids) for group in chosen for ids in group.token_ids),
            reward=(rewards * weights.cpu()).nansum().item(),
            rewarded=known.sum().item(),
        )

    def metrics(self, batch: int) -> dict[str, float]:
        """
        Args:
            batch: groups of the generation batch.
        """
        found = {
            "dapo/resampled_groups": self.drawn - batch,
            "dapo/kept_equal_groups": self.kept_equal,
            "dapo/rollout_tokens_per_used_token": self.tokens / self.used,
        }
        if self.rewarded:  # that of the batch is another: a group that is always right is not in it
            found["dapo/reward_before_filtering"] = self.reward / self.rewarded
        return found


class DynamicSampling(TrainerCallback):
    """The stream over all rollouts, and the end of the training where it has used up its epochs.

    Args:
        batch: groups of a generation batch, of all processes.
        max_resample_factor: groups that a rollout may draw, over `batch`.
        seed, equal_by, weights: as a Collection has them.
        window_done: whether the next micro-batch begins a rollout.
    """

    def __init__(
        self,
        stream: PromptStream,
        hooks: Hooks,
        *,
        batch: int,
        max_resample_factor: float,
        seed: int,
        equal_by: int | None,
        weights: torch.Tensor,
        window_done: Callable[[], bool],
    ):
        self.stream, self.hooks, self.batch, self.factor = stream, hooks, batch, max_resample_factor
        self.seed, self.equal_by, self.weights, self.window_done = seed, equal_by, weights, window_done

    def collect(
        self,
        sampler: Sampler,
        request: RolloutRequest,
        of_all_processes: Callable[[list[float]], torch.Tensor],
        process: int,
        processes: int,
    ) -> Collected:
        """This process's part of a generation batch; the metrics of its completions hold what it cost all processes.
        Every process must come here.

        Args:
            request: without prompts.
            of_all_processes: from numbers of this process to [processes, numbers].
        """
        positions, needed, most = self._begin(process, processes)
        collection = Collection(
            positions,
            self.hooks,
            needed=needed,
            most=most,
            size=request.group_size,
            seed=self.seed,
            equal_by=self.equal_by,
            weights=self.weights,
        )
        tokens, metrics = draw(collection, sampler, request, lambda count: int(of_all_processes([count]).max()))
        mine = Cost.of(collection, collection.chosen(), tokens, self.weights)
        cost = self._end(of_all_processes([float(number) for number in mine]))
        return collected(collection, metrics | cost.metrics(self.batch))

    def _begin(self, process: int, processes: int) -> tuple[Iterator[int], int, int]:
        """A rollout of this process: positions, groups needed, groups that it may draw."""
        needed = self.batch // processes
        if self.stream.left < self.batch:
            raise UserError(
                f"--config.training.num_train_epochs: {int(self.stream.left)} prompts are left of its epochs, and a"
                f" generation batch takes {self.batch}; train for more epochs, or write --config.training.max_steps"
            )
        return self.stream.share(process, processes), needed, max(needed, int(needed * self.factor))

    def _end(self, costs: torch.Tensor) -> Cost:
        """A rollout has ended: what it cost all processes.

        Args:
            costs: [processes, numbers of Cost].
        """
        self.stream.drawn([int(count) for count in costs[:, 0].tolist()])
        cost = Cost(*costs.double().sum(dim=0).tolist())
        if cost.kept_equal:
            why = "the data set's last prompts are drawn" if self.stream.left < self.batch else "the limit is reached"
            warn_once(
                f"dynamic sampling: {why} before the batch has enough groups of unequal rewards; equal ones fill it,"
                " which teach nothing (dapo/kept_equal_groups counts them, algorithm.max_resample_factor is the limit)"
            )
        return cost

    def on_train_begin(self, args, state, control, **kwargs):
        """A resumed run may have used up its epochs: it trains no further, as one that has made all its steps."""
        if state.global_step:
            self._ends(args, state)

    def on_step_end(self, args, state, control, **kwargs):
        state.epoch = self.stream.epoch
        if self._ends(args, state):
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy == "steps"

    def _ends(self, args: Any, state: Any) -> bool:
        """Whether the stream ends the training here, before its steps are made: then this step is the last, for all
        that asks."""
        if self.stream.left >= self.batch or not self.window_done() or state.global_step >= state.max_steps:
            return False
        if state.is_world_process_zero:
            log.info(
                "dynamic sampling: the prompts of %g epochs are used up after step %d of at most %d: the training ends",
                args.num_train_epochs, state.global_step, state.max_steps,
            )  # fmt: skip
        state.max_steps = state.global_step
        return True
