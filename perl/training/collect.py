"""The trajectories of a generation batch: prompts of the stream, sampled by the engine, scored by the rewards.

With DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) groups of equal rewards, which teach nothing, are replaced
by further prompts. Which groups are chosen depends on the stream's order alone: the first ones with unequal rewards.
How many are drawn at once is a matter of speed: so many that a second round, whose longest completion everybody would
wait for, is rarely needed (`to_draw`). What was drawn behind the last chosen group goes back to the head of the stream,
and is drawn again by the next policy.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import GenerationConfig

from perl.algorithms.grpo import equal_groups, weighted_sum
from perl.base.errors import UserError, say_once
from perl.engines.base import PolicyEngine
from perl.engines.torch_policy import sampling_of
from perl.environments.conversation import Conversations
from perl.prompts import ChatTemplate, truncated
from perl.records import Asked, Completion, Sampling, Trajectory, Weights
from perl.rewards.files import text_of
from perl.rewards.functions import GradeEarly, logged_name
from perl.rewards.score import Rewards
from perl.runs.metrics import StepClock, sequences
from perl.training.stream import PromptStream

if TYPE_CHECKING:
    from perl.config.schema import DatasetConfig
    from perl.config.training import TrainingConfig
    from perl.training.processes import Processes

log = logging.getLogger(__name__)

MOST_EQUAL = 0.9
"""Share of equal groups that is reckoned with at most."""
MARGIN = 1.5
"""Standard deviations of the number of unequal groups that are drawn on top: about one rollout in fifteen needs a
second round, where the mean number alone would need one in every other rollout."""
LATEST = 0.3
"""Weight of the latest rollout in the share of equal groups."""

Group = list[Trajectory]
"""The completions of one prompt."""


class ReadPrompt(NamedTuple):
    """A prompt as the model reads it."""

    token_ids: tuple[int, ...]
    images: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Ahead:
    """A batch that the engine has, or is drawing."""

    first: int
    """Position of its first prompt."""
    weights: Weights
    """That draw it."""
    rows: list[Trajectory]
    """This process's, those of the greedy baselines last."""
    complete: Iterator[Trajectory]
    """Each of them when it is drawn to its end."""


@dataclass(slots=True, kw_only=True)
class Collector:
    """
    Attributes:
        rows: of the data set.
        read: a row's prompt.
        text: of a completion's tokens.
        sampling: of a whole completion, whose seed names its prompt's place in the stream, and its place in the group.
        batch: prompts of a generation batch, of all processes.
        state: of the trainer, for reward functions; transformers makes another when the training begins.
        max_resample_factor: groups that a rollout with dynamic sampling may draw, over those of a batch; None: equal
            groups are not replaced.
        greedy: the prompts' greedy completions are drawn and scored too, as baselines; see `Algorithm.greedy`.
        equal_by: the reward function that is asked whether a group is equal; None: the weighted sum.
        conversations: with an environment, of several turns each; None: a completion is the answer.
        longest: tokens that a conversation may reach, its prompt included; None: any number.
        batches_ahead: that are drawn ahead of the one that is collected; an engine that draws when it is read has 0.
        ahead: the batches that were begun and not collected, the next one first.
    """

    stream: PromptStream
    rows: Any
    read: Callable[[dict[str, Any]], ReadPrompt]
    text: Callable[[Sequence[int]], str]
    engine: PolicyEngine
    sampling: Sampling
    rewards: Rewards
    grade_early: GradeEarly | None
    batch: int
    group_size: int
    processes: Processes
    clock: StepClock
    state: Callable[[], Any]
    greedy: bool = False
    max_resample_factor: float | None = None
    equal_by: int | None = None
    conversations: Conversations | None = None
    longest: int | None = None
    batches_ahead: int = 0
    ahead: deque[Ahead] = field(default_factory=deque)

    def collect(self, weights: Weights, left: int = 1) -> tuple[list[Trajectory], dict[str, float]]:
        """This process's trajectories, groups one after the other, sampled and scored, and what the log shows of it.
        Every process must come here.

        Batch b is begun with the weights of batch max(0, b - batches_ahead), so that a run does not depend on how fast
        anything is; and with an engine that has the newest draw what nobody has begun, at the latest by those of batch
        b. As batches are taken in the stream's order, none is ever older than `batches_ahead`, and the long ones are as
        many as the short ones.

        Args:
            weights: those that the engine has been given.
            left: batches that the run will collect, this one included.
        """
        if self.max_resample_factor is not None:
            return self._without_equal_groups(self._most_groups(self.max_resample_factor), weights)
        begun = len(self.ahead)
        while len(self.ahead) <= min(self.batches_ahead, left - 1):
            self.begin(self.stream.next, weights)
            self.stream.next += self.batch
        if self.batches_ahead and len(self.ahead) == begun:
            self.engine.stream([])  # what nobody has begun is drawn by the newest policy to the run's end
        drawn = self._scored(self.ahead[0])
        self.ahead.popleft()  # once it is whole: a run that ends before goes on with it
        return drawn, {}

    def begin(self, first: int, weights: Weights) -> None:
        """Have the engine draw the batch whose first prompt stands at `first`. Every process must come here."""
        count = self.batch * self.group_size // self.processes.count
        own = self.processes.rank * count  # a group may lie on two processes
        places = [divmod(place, self.group_size) for place in range(own, own + count)]
        self.ahead.append(self._begun(first, [(first + prompt, sample) for prompt, sample in places], weights))

    def state_ahead(self) -> list[dict[str, Any]]:
        """What a checkpoint holds of the batches that are drawn ahead: tensors and plain values."""
        versions, made = {batch.weights.version for batch in self.ahead}, self.state().global_step
        policies = {version: self.engine.state(version, own=version == made) for version in versions}
        return [
            {"first": b.first, "weights": asdict(b.weights), "lag": self.batches_ahead, **policies[b.weights.version]}
            for b in self.ahead
        ]

    def go_on_with(self, ahead: list[dict[str, Any]]) -> None:
        """Have the engine draw what `ahead` was of, by the same policies; or newer ones where these are older than the
        lag is now. Every process must come here."""
        for batch in ahead:
            weights = Weights(**batch["weights"])
            too_old = self.max_resample_factor is not None or batch.get("lag", 0) > self.batches_ahead
            if too_old or not self.engine.publish_again(weights, batch):
                count = self.stream.next - batch["first"]
                log.info("rollouts: %d prompts that were drawn ahead are drawn again, by newer weights", count)
                self.stream.next = batch["first"]
                return
            self.begin(batch["first"], weights)

    # Groups of equal rewards are replaced

    def _without_equal_groups(self, limit: int, weights: Weights) -> tuple[list[Trajectory], dict[str, float]]:
        first = self.stream.next
        groups: dict[int, Group] = {}
        """This process's, by position."""
        owner: list[int] = []
        equal: list[bool] = []
        """Process and verdict of each position from `first`, of all processes."""
        share = self.stream.equal_share
        while (missing := self.batch - equal.count(False)) > 0 and len(equal) < limit:
            count = min(to_draw(missing, share), limit - len(equal))
            positions = range(first + len(equal), first + len(equal) + count)
            local = positions[self.processes.rank :: self.processes.count]
            places = [(position, sample) for position in local for sample in range(self.group_size)]
            rows = self._scored(self._begun(first, places, weights))
            for place, position in enumerate(local):
                groups[position] = rows[place * self.group_size : (place + 1) * self.group_size]
            verdicts = dict(
                self.processes.gathered([(position, self.is_equal(groups[position])) for position in local])
            )
            owner += [place % self.processes.count for place in range(count)]
            equal += [verdicts[position] for position in positions]
            share = equal.count(True) / len(equal)
        chosen = choose(equal, self.batch)
        filled = self.batch <= equal.count(False)
        self.stream.next = first + (chosen[-1] + 1 if filled else len(equal))
        before = self.stream.equal_share
        self.stream.equal_share = LATEST * share + (1 - LATEST) * before if before else share
        if not filled:
            self._say_what_fills_the_batch()
        kept = self._share_out([first + place for place in chosen], [owner[place] for place in chosen], groups)
        rows = [row for group in kept for row in group]
        return rows, self._cost(list(groups.values()), rows, len(equal), chosen, equal)

    def _most_groups(self, max_resample_factor: float) -> int:
        """Groups that a rollout of all processes may draw."""
        if self.stream.left < self.batch:
            raise UserError(
                f"--config.training.num_train_epochs: {int(self.stream.left)} prompts are left of its epochs, and a"
                f" generation batch takes {self.batch}; train for more epochs, or write --config.training.max_steps"
            )
        return int(min(max(self.batch, self.batch * max_resample_factor), self.stream.left))

    def is_equal(self, group: Group) -> bool:
        """By the function that is asked, or where it gives this group no reward, by the sum. What is not finite is the
        trainer's to see."""
        rewards, asked = self.rewards.of(group), self.equal_by
        if rewards.isinf().any():
            return False
        by_sum = asked is None or rewards[:, asked].isnan().all()
        compared = weighted_sum(rewards, self.rewards.weights.cpu()) if by_sum else rewards[:, asked]
        return bool(equal_groups(compared[None]))

    def _share_out(self, positions: list[int], owners: list[int], groups: dict[int, Group]) -> list[Group]:
        """As many of the chosen groups for each process; those that another process has drawn are handed over. Every
        process must come here."""
        needed = self.batch // self.processes.count
        rank = self.processes.rank
        shares = [[p for p, owner in zip(positions, owners, strict=True) if owner == each] for each in
                  range(self.processes.count)]  # fmt: skip
        spare = [position for share in shares for position in share[needed:]]
        if spare:
            groups = groups | dict(self.processes.gathered([(p, groups[p]) for p in shares[rank][needed:]]))
        for share in shares:
            del share[needed:]
            share += [spare.pop(0) for _ in range(needed - len(share))]
        return [groups[position] for position in sorted(shares[rank])]

    def _say_what_fills_the_batch(self) -> None:
        why = "the data set's last prompts are drawn" if self.stream.left < self.batch else "the limit is reached"
        say_once(
            f"dynamic sampling: {why} before the batch has enough groups of unequal rewards; equal ones fill it,"
            " which teach nothing (dapo/kept_equal_groups counts them, algorithm.max_resample_factor is the limit)"
        )

    def _cost(
        self, local: list[Group], rows: list[Trajectory], drawn: int, chosen: list[int], equal: list[bool]
    ) -> dict[str, float]:
        """What a rollout has cost all processes. Every process must come here."""
        rewards = self.rewards.of([row for group in local for row in group])
        known = ~rewards.isnan().all(dim=1)
        tokens, used, reward, rewarded = self.processes.added_up(
            [
                float(sum(sum(row.sampled) for group in local for row in group)),
                float(sum(sum(row.sampled) for row in rows)),
                (rewards * self.rewards.weights.cpu()).nansum().item(),
                float(known.sum()),
            ]
        )
        metrics = {
            "dapo/resampled_groups": float(drawn - self.batch),
            "dapo/returned_groups": float(drawn - (chosen[-1] + 1)),
            "dapo/kept_equal_groups": float(sum(equal[place] for place in chosen)),
        }
        if used:
            metrics["dapo/rollout_tokens_per_used_token"] = tokens / used
        if rewarded:  # that of the batch is another: a group that is always right is not in it
            metrics["dapo/reward_before_filtering"] = reward / rewarded
        return metrics

    # Sampled and scored

    def _begun(self, first: int, places: Sequence[tuple[int, int]], weights: Weights) -> Ahead:
        """A trajectory for each (position, sample), for the engine to draw. Every process must come here, with as many
        or fewer."""
        reads: dict[int, tuple[dict[str, Any], ReadPrompt]] = {}
        for position, _ in places:
            if position not in reads:
                row = self.rows[self.stream.row(position)]
                reads[position] = row, self.read(row)

        def begun(position: int, sample: int, sampling: Sampling) -> Trajectory:
            row, read = reads[position]
            return Trajectory(
                row=row,
                position=position,
                sample=sample,
                prompt_ids=read.token_ids,
                images=read.images,
                asked=Asked(sampling=sampling, key=f"stream-{position}", longest=self.longest),
                weights=weights,
            )

        rows = [begun(*place, self.sampling) for place in places]
        if self.greedy:  # the baselines' places in the group are behind those that are trained on
            greedy = replace(self.sampling, temperature=0.0)
            rows += [begun(position, self.group_size, greedy) for position in reads]
        with self.clock("rollout"):
            if self.conversations is None:
                complete = self._completed(rows, self.engine.stream([row.next_prompt() for row in rows]))
            else:
                complete = self.engine.converse(self.conversations, rows)
        return Ahead(first, weights, rows, complete)

    def _completed(self, rows: list[Trajectory], completions: Iterator[tuple[int, Completion]]) -> Iterator[Trajectory]:
        for place, completion in completions:
            row = rows[place]
            row.add(completion)
            text = self.text(completion.content_ids)
            row.completion = [{"role": "assistant", "content": text}] if is_chat(row.row["prompt"]) else text
            yield row

    def _scored(self, batch: Ahead) -> list[Trajectory]:
        """Those that are trained on, once they are drawn. Every process must come here."""
        rows = batch.rows
        with self.clock("rollout"):
            for row in batch.complete:
                if self.grade_early is not None and row.failure is None:
                    self.grade_early(text_of(row.completion), row.row)
        if not self.engine.remote:  # the FLOPs are of this process's device
            self.clock.count_forward(sequences([len(row.prompt_ids) + len(row.token_ids) for row in rows]))
        drawn = [row for row in rows if row.sample < self.group_size]
        greedy = rows[len(drawn) :]
        with self.clock("reward"):
            self.rewards.score(drawn, self.state())
            self.rewards.score(greedy, self.state(), log_metrics=False)
        if self.conversations is not None:
            self.conversations.measure(drawn, self.rewards.metrics)
            self.conversations.free(rows)
        baselines = {row.position: row.rewards for row in greedy}
        for row in drawn:
            row.baseline = baselines.get(row.position, [])
        for named in self.rewards.infinite(greedy):
            log.warning("remax: a reward of a greedy completion is not finite, and no baseline: %s", named)
        return drawn


def rollout_sampling(args: TrainingConfig, further: dict[str, Any]) -> Sampling:
    """How completions are drawn in the run, as the user's generation_kwargs (`further`) leave it."""
    names = "temperature", "top_p", "top_k", "min_p", "repetition_penalty"
    values = {name: further.get(name, getattr(args, name)) for name in names}
    length = args.max_completion_length
    config = GenerationConfig(do_sample=further.get("do_sample", True), max_new_tokens=length, **values)
    return replace(sampling_of(config), seed=args.seed)


def to_draw(missing: int, share: float) -> int:
    """How many groups to draw for `missing` unequal ones, where a `share` of them is equal: n of which
    n (1 - share) - MARGIN sqrt(n share (1 - share)), the mean number less so many standard deviations, is enough."""
    unequal = 1 - min(share, MOST_EQUAL)
    spread = MARGIN * math.sqrt((1 - unequal) * unequal)
    root = (spread + math.sqrt(spread**2 + 4 * unequal * missing)) / (2 * unequal)
    return math.ceil(root**2 - 1e-9)


def choose(equal: Sequence[bool], needed: int) -> list[int]:
    """The places of `needed` groups in their order: the first ones with unequal rewards, and where these are too few
    the first equal ones."""
    unequal = [place for place, same in enumerate(equal) if not same][:needed]
    filling = [place for place, same in enumerate(equal) if same][: needed - len(unequal)]
    return sorted(unequal + filling)


def compared_reward(asked: str | None, names: Sequence[str]) -> int | None:
    """Which of the reward functions `names` must differ within a group; None: the weighted sum of all.

    Args:
        asked: algorithm.dynamic_sampling_metric.
    """
    if asked is None:
        return names.index("accuracy") if "accuracy" in names else None
    return None if asked == "sum" else names.index(logged_name(asked))


def read_prompt(row: Mapping[str, Any], *, tokenizer: Any, template: ChatTemplate, data: DatasetConfig) -> ReadPrompt:
    """A row's prompt, cut as `data` asks where it is too long."""
    prompt = row["prompt"]
    if not is_chat(prompt):
        return ReadPrompt(tuple(tokenizer(text=prompt)["input_ids"]))
    images = tuple(each["bytes"] for each in row.get("images") or ())
    ids = template.prompt(prompt, images)
    if data.max_prompt_length is None or data.truncation == "error":  # longer ones were refused
        return ReadPrompt(tuple(ids), images)
    return ReadPrompt(tuple(truncated(ids, data.max_prompt_length, data.truncation)), images)


def is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str)
