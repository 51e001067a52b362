#!/usr/bin/env bash
set -x
ENGINE=${1:-vllm}
DEVICE=${DEVICE:-npu}
N_CPU=$(nproc)

if command -v npu-smi > /dev/null 2>&1; then
    echo "on NPUs"
    DEVICE_NAME=npu
else
    DEVICE_NAME=cuda
fi

case "${DEVICE}" in
    npu) export HCCL_CONNECT_TIMEOUT=1500; GPUS=16 ;;
    cuda | gpu) GPUS=8 ;;
    *) echo "unknown device ${DEVICE}"; exit 1 ;;
esac

if [ "$ENGINE" = "vllm" ]; then
    export VLLM_USE_V1=1
    ENGINE_ARGS="actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.free_cache_engine=True"
elif [ "$ENGINE" == "sglang" ]; then
    ENGINE_ARGS=""
fi

train() {
    local name=$1
    shift
    python3 -m verl.trainer.main_ppo \
        algorithm.adv_estimator=grpo \
        data.train_files=["$HOME/data/geo3k/train.parquet"] \
        data.val_files=["$HOME/data/geo3k/test.parquet"] \
        data.dataloader_num_workers=$N_CPU \
        data.train_batch_size=512 \
        actor_rollout_ref.model.path=${MODEL_PATH:-Qwen/Qwen3-8B} \
        actor_rollout_ref.actor.ppo_mini_batch_size=128 \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
        actor_rollout_ref.rollout.name=$ENGINE \
        actor_rollout_ref.rollout.n=4 \
        +data.apply_chat_template_kwargs.enable_thinking=False \
        trainer.device=$DEVICE_NAME \
        trainer.n_gpus_per_node=$GPUS \
        trainer.experiment_name="${name}_$(date +%s)" \
        $ENGINE_ARGS "$@"
}

train qwen3_8b trainer.total_training_steps=100 trainer.save_freq=20
