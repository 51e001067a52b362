"""One rank of a tiny run of REINFORCE++, started by accelerate: python -m tests.npu.algorithm_worker OUT [SETTINGS].

Four steps with a checkpoint after two, and the same from there to the end. Advantages of tokens, KL in the reward with
an adapted coefficient, and KL in the loss as mse.
Writes OUT/rank<N>.json, with a report of each, and OUT/whole/adapter and OUT/resumed/adapter.
"""

import json
import sys
from pathlib import Path

from accelerate import PartialState

from tests.ranks import leave
from tests.trainers import make_trainer, reward_tokens


def main() -> None:
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    kl = {"kl_estimator": "mse", "kl_in_reward": 0.1, "kl_in_reward_target": 1e-3, "kl_in_reward_horizon": 8}
    fixed = {"max_steps": 4, "engine": "fast", "save_strategy": "steps", "save_steps": 2, "rewards": (reward_tokens,)}
    algorithm = {"name": "reinforce_plus_plus", "gamma": 0.99} | kl
    names = ("loss", "kl", "kl_in_reward", "kl_in_reward/coefficient", "advantages/std")
    reports = {}
    for part, checkpoint in (("whole", None), ("resumed", str(out / "whole" / "checkpoint-2"))):
        trainer = make_trainer(out / part, algorithm=algorithm, beta=0.1, **(fixed | settings))
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(out / part / "adapter"))
        logs = [row for row in trainer.state.log_history if "loss" in row]
        reports[part] = {"device": str(trainer.args.device)} | {name: [row[name] for row in logs] for name in names}
        PartialState().wait_for_everyone()
    leave(out, PartialState().process_index, reports)


if __name__ == "__main__":
    main()
