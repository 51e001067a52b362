#!/bin/sh
export HYDRA_FULL_ERROR=1
ulimit -n 65535
nohup python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=remax \
  data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=1 > train.log 2>&1 &
