"""One rank of a tiny PPO run, started by accelerate: python -m tests.npu.critic_worker OUT_FOLDER SETTINGS.

Three steps with a checkpoint after each, and the same from the first of these to the end; SETTINGS is JSON for
make_trainer. Writes OUT_FOLDER/rank<N>.json: of each the logs, and what the policy's layers are left with; and what
they have trained in OUT_FOLDER/whole and OUT_FOLDER/resumed.
"""

import json
import math
import sys
from pathlib import Path

from accelerate import PartialState

from tests.ranks import leave
from tests.trainers import make_trainer, reward_tokens


def main() -> None:
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    fixed = {"max_steps": 3, "engine": "fast", "save_strategy": "steps", "save_steps": 1, "rewards": (reward_tokens,)}
    algorithm = {"algorithm": {"name": "ppo"}, "critic": {"lr": 1e-2, "r": 4}, "loss_type": "dapo"}
    reports = {}
    for part, checkpoint in (("whole", None), ("resumed", str(out / "whole" / "checkpoint-1"))):
        trainer = make_trainer(out / part, **(fixed | algorithm | settings))
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(out / part / "adapter"))
        trainer.save_critic(out / part)
        logs = [row for row in trainer.state.log_history if "loss" in row]
        reports[part] = {
            "device": str(trainer.args.device),
            "vf_loss": [row["critic/vf_loss"] for row in logs],
            "values": [row["critic/values_mean"] for row in logs],
            "rewards": [row["reward"] for row in logs],
            "left": [name for name, m in trainer.model.named_modules() if "forward" in vars(m) and "layers" in name],
            "finite": all(math.isfinite(row["loss"]) for row in logs),
        }
        PartialState().wait_for_everyone()
    leave(out, PartialState().process_index, reports)


if __name__ == "__main__":
    main()
