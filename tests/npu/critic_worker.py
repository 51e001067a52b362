"""One rank of a tiny PPO run, started by accelerate: python -m tests.npu.critic_worker OUT_FOLDER [JSON settings].

Three steps with a checkpoint after each or, where the setting "again" is true, from the first of these to the end.
Writes OUT_FOLDER/rank<N>.json: the logs, and what the policy's layers are left with.
"""

import json
import sys
from pathlib import Path

import torch

from tests.ranks import leave
from tests.trainers import make_trainer, reward_tokens


def main() -> None:
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    again = settings.pop("again", False)
    fixed = {"max_steps": 3, "engine": "fast", "save_strategy": "steps", "save_steps": 1, "rewards": (reward_tokens,)}
    algorithm = {"algorithm": {"name": "ppo"}, "critic": {"lr": 1e-2, "r": 4}, "loss_type": "dapo"}
    trainer = make_trainer(out / ("again" if again else "run"), **(fixed | algorithm | settings))
    trainer.train(resume_from_checkpoint=str(out / "run" / "checkpoint-1") if again else None)
    trainer.save_model(str(out / "adapter"))
    trainer.save_critic(out)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    report = {
        "distributed_type": str(trainer.accelerator.distributed_type),
        "device": str(trainer.args.device),
        "losses": [row["loss"] for row in logs],
        "vf_loss": [row["critic/vf_loss"] for row in logs],
        "values": [row["critic/values_mean"] for row in logs],
        "explained": [row["critic/explained_variance"] for row in logs],
        "rewards": [row["reward"] for row in logs],
        "left": [name for name, m in trainer.model.named_modules() if "forward" in vars(m) and "layers" in name],
        "finite": all(torch.isfinite(torch.tensor(row["loss"])) for row in logs),
    }
    leave(out, trainer.args.process_index, report)


if __name__ == "__main__":
    main()
