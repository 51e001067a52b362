"""One rank of a tiny run of many small micro-batches, started by accelerate: python -m tests.npu.empty_worker OUT
SETTINGS.

Writes OUT/rank<N>.json: forwards with a gradient of each step, and its loss and gradient norm; and OUT/adapter.
"""

import json
import sys
from pathlib import Path

import torch

from tests.ranks import leave
from tests.trainers import make_trainer, reward_tokens


def half_equal(completion_ids, prompts, **columns):
    """Of some prompts all completions earn the same."""
    rewards = reward_tokens(completion_ids)
    return [1.0 if "0" in p[-1]["content"] else r for p, r in zip(prompts, rewards, strict=True)]


def main() -> None:
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    trainer = make_trainer(out / "run", engine="fast", rewards=(half_equal,), max_steps=3, **settings)
    forwards: list[int] = []

    def count(module, args):
        if torch.is_grad_enabled():
            forwards.append(trainer.state.global_step)

    trainer.accelerator.unwrap_model(trainer.model).register_forward_pre_hook(count)
    trainer.train()
    trainer.save_model(str(out / "adapter"))
    logs = [row for row in trainer.state.log_history if "loss" in row]
    report = {"forwards": [forwards.count(step) for step in range(3)]}
    report |= {name: [row[name] for row in logs] for name in ("loss", "grad_norm", "update/rows_left_out")}
    leave(out, trainer.args.process_index, report)


if __name__ == "__main__":
    main()
