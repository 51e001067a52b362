#!/usr/bin/env bash
source ~/.bashrc
[ -z "${WANDB_API_KEY:-}" ] && export WANDB_MODE=offline
test -d outputs || mkdir -p outputs
read -r -d '' EXTRA <<ARGS
one more word
ARGS
ALGO_ARGS="algorithm.adv_estimator=grpo"
python -m verl.trainer.main_ppo ${ALGO_ARGS} \
  data.train_files=${DATA_DIR:?set DATA_DIR}/train.parquet \
  data.val_files=/d/val.parquet \
  actor_rollout_ref.model.path=/m actor_rollout_ref.rollout.n=8 \
  data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
