#!/usr/bin/env bash
# PPO with a reward model, settings in arrays
set -xeuo pipefail
NNODES=${WORLD_SIZE:-1}
MODEL=${1:-deepseek-ai/deepseek-llm-7b-chat}

DATA=(
    data.train_files=$HOME/data/full_hh_rlhf/rl/train.parquet
    data.val_files=$HOME/data/full_hh_rlhf/rl/train.parquet
    data.train_batch_size=512
    data.max_prompt_length=128
    data.max_response_length=128
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
)
CRITIC=(
    critic.optim.lr=1e-5
    critic.model.path="$MODEL"
    critic.model.enable_gradient_checkpointing=False
    critic.ppo_micro_batch_size_per_gpu=4
    critic.megatron.tensor_model_parallel_size=2
)
if [[ "$NNODES" -gt 1 ]]; then
    ACTOR+=(actor_rollout_ref.actor.fsdp_config.param_offload=True)
fi

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    "${DATA[@]}" "${ACTOR[@]}" ${CRITIC[*]} \
    reward_model.enable=True \
    reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 \
    reward_model.micro_batch_size_per_gpu=4 \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=$NNODES "$@"
