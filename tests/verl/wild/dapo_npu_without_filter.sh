#!/bin/bash
project_name='DAPO'
exp_name='DAPO-Qwen3-8B-base-npu'
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
enable_overlong_buffer=False
NNODES=${NNODES:-1}
NPUS_PER_NODE=${NPUS_PER_NODE:-16}
MODEL_PATH=${MODEL_PATH:-"${HOME}/models/Qwen3-8B-Base"}
train_prompt_bsz=16
n_resp_per_prompt=16
train_prompt_mini_bsz=2
HYDRA_FULL_ERROR=1 PYTHONUNBUFFERED=1 python3 -m recipe.dapo.main_dapo \
    data.train_files="${HOME}/data/dapo-math-17k.parquet" \
    data.val_files="['${HOME}/data/aime-2024.parquet']" \
    data.prompt_key=prompt data.truncation=left \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.gen_batch_size=${train_prompt_bsz} \
    data.train_batch_size=${train_prompt_bsz} \
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=False \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz} \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    critic.strategy=fsdp2 \
    actor_rollout_ref.ref.strategy=fsdp2 \
    actor_rollout_ref.actor.entropy_checkpointing=True \
    actor_rollout_ref.actor.entropy_from_logits_with_chunking=True \
    actor_rollout_ref.actor.fsdp_config.forward_prefetch=True \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.rollout.name=vllm \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_log_stats=False \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.enable_prefix_caching=True \
    reward_model.reward_manager=dapo \
    reward_model.overlong_buffer.enable=${enable_overlong_buffer} \
    reward_model.overlong_buffer.len=$((1024 * 4)) \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.logger="['console']" \
    trainer.n_gpus_per_node="${NPUS_PER_NODE}" trainer.nnodes="${NNODES}" \
    trainer.device="npu" \
    trainer.total_epochs=1 trainer.test_freq=-1 trainer.val_before_train=False 2>&1 | tee "logs/verl_$(date +%Y%m%d_%H%M).log"
