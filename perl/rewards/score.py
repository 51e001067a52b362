"""A run's reward functions, called as TRL's GRPOTrainer calls them: on all trajectories of a process at once."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from perl.base.errors import RankError
from perl.environments.tools import ToolUse
from perl.records import Trajectory
from perl.rewards.files import ROW, in_verls_form, row_name

log = logging.getLogger(__name__)


class Rewards:
    """
    Args:
        functions: each takes `prompts`, `completions`, `completion_ids` (what the policy drew), the columns of the data
            set, `trainer_state`, `log_extra(column, values)` and `log_metric(name, value)` by keyword, with
            environments also `environments`, as TRL has it, `environment_rewards` and `completion_lengths` (in tokens,
            observed ones too), and gives one number, or None, for each completion; plain functions or coroutines, which
            run together.
        names: of each, in the metrics.
        weights: float [functions].
        decode: the text of tokens, where the rows are conversations with environments: functions in verl's form are
            given all that stands behind the prompt (`responses`, and `turns`); None: they are none.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        names: Sequence[str],
        weights: torch.Tensor,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        self.functions, self.names, self.weights = list(functions), list(names), weights
        self.decode, self._whole = decode, any(map(in_verls_form, functions))
        self.metrics: dict[str, list[float]] = defaultdict(list)
        """What the functions have logged by `log_metric`, for whoever logs next."""

    def score(self, rows: Sequence[Trajectory], state: Any, log_metrics: bool = True) -> None:
        """Fill each row's `rewards` (NaN where a function gave none, and in a row that has failed, which no function
        sees) and `extras`.

        Args:
            state: the trainer's.
            log_metrics: whether what the functions log by `log_metric` counts, and a completion without any number is
                warned of.

        Raises:
            RankError: a function gives another number of rewards, or logs too few values.
        """
        for row in rows:
            row.rewards = [math.nan] * len(self.functions)
        rows = [row for row in rows if row.failure is None]
        if not rows:
            return
        extras: dict[str, list[Any]] = defaultdict(list)
        metrics = self.metrics if log_metrics else defaultdict(list)
        columns = {name: [row.row[name] for row in rows] for name in rows[0].row if name != "prompt"}
        arguments: dict[str, Any] = {
            "prompts": [row.row["prompt"] for row in rows],
            "completions": [row.completion for row in rows],
            "completion_ids": [row.sampled_ids for row in rows],
            **columns,
            **(of_environments(rows) if self.decode else {}),
            "trainer_state": state,
            "log_extra": lambda column, values: extras[column].extend(values),
            "log_metric": lambda name, value: metrics[str(name)].append(float(value)),  # raises in the function's call
        }
        if self.decode and self._whole:
            arguments["responses"] = [self.decode(row.token_ids) for row in rows]
            arguments["turns"] = [row.turns for row in rows]
        scores = [self._checked(*pair, len(rows)) for pair in zip(self.names, self._call(arguments), strict=True)]
        for column, values in extras.items():
            if len(values) < len(rows):
                raise RankError(
                    f"--config.reward.functions: log_extra({column!r}, …) got {len(values)} values for {len(rows)}"
                    " completions; give one for each"
                )
        for place, row in enumerate(rows):
            row.rewards = [one[place] for one in scores]
            row.extras = {column: values[place] for column, values in extras.items()}
        unrewarded = next((row for row in rows if all(map(math.isnan, row.rewards))), None)
        if unrewarded is not None and log_metrics:
            log.warning("no reward function gives this completion a number: %s", str(unrewarded.completion)[:300])

    def _call(self, arguments: dict[str, Any]) -> list[Any]:
        results = [function(**arguments) for function in self.functions]
        waiting = [place for place, result in enumerate(results) if inspect.isawaitable(result)]

        async def together() -> list[Any]:
            return await asyncio.gather(*(results[place] for place in waiting))

        for place, result in zip(waiting, asyncio.run(together()) if waiting else [], strict=True):
            results[place] = result
        return results

    def _checked(self, name: str, rewards: Sequence[float | None], count: int) -> list[float]:
        if len(rewards) != count:
            raise RankError(
                f"--config.reward.functions {name}: it returned {len(rewards)} rewards for {count} completions; return"
                " one for each"
            )
        return [math.nan if reward is None else float(reward) for reward in rewards]

    def of(self, rows: Sequence[Trajectory]) -> torch.Tensor:
        """float32 [rows, functions]: what `score` has filled in."""
        return torch.tensor([row.rewards for row in rows], dtype=torch.float32).view(len(rows), len(self.functions))

    def infinite(self, rows: Sequence[Trajectory]) -> list[str]:
        """The infinite ones of `of`, each as its function and row."""
        named = []
        for place, function in self.of(rows).isinf().nonzero().tolist():
            row = rows[place]
            where = row_name(place, row.completion, row.row["prompt"], row.row.get(ROW))
            named.append(f"{self.names[function]} on {where}")
        return named


def of_environments(rows: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """What reward functions get of them: of a class of TRL's the instance itself, unless a worker has it."""
    here = [row.environment for row in rows if row.environment is not None]
    given = [each.instance if isinstance(each, ToolUse) and each.instance is not None else each for each in here]
    return {
        **({"environments": given} if here else {}),
        "environment_rewards": [row.environment_reward for row in rows],
        "completion_lengths": [len(row.token_ids) for row in rows],
    }


def environment(environment_rewards: Sequence[float | None], **_: Any) -> Sequence[float | None]:
    """The reward that an environment gives itself, as a reward function of that name."""
    return environment_rewards
