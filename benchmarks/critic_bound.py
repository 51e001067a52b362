"""How much of the reward's variance can a critic explain at best? Of the quickstart's problem and base model.

    python -m benchmarks.critic_bound [--problems 48] [--completions 64]

With gamma = lambda = 1 the return of each token is the completion's reward, and the critic sees the prompt and the
tokens before. The best function of these is the mean reward of all completions that begin so; it is estimated by the
other completions that share the prefix, or, where there is none, the longest prefix that another one shares. The last
line is JSON: "explained" is 1 - variance of (reward - estimate) / variance of the reward over all tokens, which
critic/explained_variance has no way to exceed for long, and "by_token" the same of each token alone, the first of
which knows the prompt only.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from perl.config.load import parse
from perl.grading import Grader
from perl.prompts import ChatTemplate, encode
from perl.rewards.functions import grade_rows
from perl.runs.setup import build_dataset, load_model, load_tokenizer


def estimates(completions: Sequence[tuple[int, ...]], rewards: Sequence[float]) -> list[list[float]]:
    """Of each token of the completions of one prompt: the mean reward of the others that share what stands before it,
    or, where none does, the estimate of the token before."""
    count: collections.Counter[tuple[int, ...]] = collections.Counter()
    total: dict[tuple[int, ...], float] = collections.defaultdict(float)
    for tokens, reward in zip(completions, rewards, strict=True):
        for place in range(len(tokens)):
            count[tokens[:place]] += 1
            total[tokens[:place]] += reward
    found = []
    for tokens, reward in zip(completions, rewards, strict=True):
        row: list[float] = []
        for prefix in (tokens[:place] for place in range(len(tokens))):
            others = count[prefix] - 1
            row.append((total[prefix] - reward) / others if others else row[-1])
        found.append(row)
    return found


def explained(pairs: Sequence[tuple[float, float]]) -> float:
    """Of (reward, estimate)."""
    rewards = [reward for reward, _ in pairs]
    return 1 - statistics.pvariance([reward - guess for reward, guess in pairs]) / statistics.pvariance(rewards)


def until(ids: list[int], end: int) -> tuple[int, ...]:
    """The tokens up to `end` and with it."""
    return tuple(ids[: ids.index(end) + 1] if end in ids else ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--completions", type=int, default=64, help="of each problem, at least 2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Grader() as grader:
        config = parse(["--recipe", "recipes/quickstart.yaml", "--config.training.output_dir", folder]).build()
        tokenizer: Any = load_tokenizer(config.model.model_name_or_path)
        model: Any = load_model(config).eval()
        torch.manual_seed(config.common.seed)
        by_token: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
        rows: Any = build_dataset(config.dataset, ChatTemplate(tokenizer))
        for row in rows.select(range(options.problems)):
            prompt = torch.tensor([encode(tokenizer, row["prompt"])] * options.completions)
            with torch.no_grad():
                drawn = model.generate(
                    prompt, do_sample=True, top_k=0, max_new_tokens=config.training.max_completion_length
                )[:, prompt.shape[1] :]
            tokens = [until(ids, tokenizer.eos_token_id) for ids in drawn.tolist()]
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            grades = grade_rows(grader, texts, [row["gold"]] * len(texts), [row["task"]] * len(texts))
            rewards = [grade.score for grade in grades]
            for reward, guesses in zip(rewards, estimates(tokens, rewards), strict=True):
                for place, guess in enumerate(guesses):
                    by_token[place].append((reward, guess))
    everything = [pair for pairs in by_token.values() for pair in pairs]
    varied = {place: pairs for place, pairs in by_token.items() if len({reward for reward, _ in pairs}) > 1}
    result = {
        "benchmark": "critic_bound",
        "completions": len(by_token[0]),
        "reward": round(statistics.fmean(reward for reward, _ in by_token[0]), 3),
        "explained": round(explained(everything), 3),
        "by_token": [round(explained(varied[place]), 2) for place in sorted(varied)],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
