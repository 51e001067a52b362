#!/usr/bin/env bash
set -xeuo pipefail
adv_estimator=grpo
loss_mode=gspo
loss_agg_mode="seq-mean-token-mean"
clip_ratio_low=0.0003
clip_ratio_high=0.0004
PPO_MINI=${PPO_MINI:=32}
train_batch_size=$(( PPO_MINI * 4 ))
reward_path=$(dirname "$0")/my_reward.py
BASE="
  algorithm.adv_estimator=${adv_estimator}
  actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode}
  actor_rollout_ref.actor.loss_agg_mode=${loss_agg_mode}
  actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low}
  actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high}
"
torchrun --nnodes=1 -m verl.trainer.main_ppo $BASE \
    data.train_files=/data/train.parquet data.val_files=/data/val.parquet \
    data.train_batch_size=${train_batch_size} \
    actor_rollout_ref.model.path=/models/Qwen3-30B-A3B \
    actor_rollout_ref.actor.ppo_mini_batch_size=${PPO_MINI} \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
    actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
    actor_rollout_ref.actor.tis_imp_ratio_cap=2.0 \
    actor_rollout_ref.rollout.n=8 \
    custom_reward_function.path="$reward_path" \
    custom_reward_function.name=score \
    +custom_reward_function.reward_kwargs.scale=2 \
    trainer.default_local_dir=/ckpt/gspo trainer.max_actor_ckpt_to_keep=3 \
    ray_kwargs.ray_init.num_cpus=32
