#!/usr/bin/env bash
# One script for two kinds of machine: DEVICE decides, and is looked for where it is not set.
set -euo pipefail

DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo cuda)}
ENGINE=${ENGINE:-vllm}
PER_NODE=${PER_NODE:-}
rollouts=${ROLLOUTS:-8}
response=${RESPONSE:-$((1024 * 2))}
run_name=${RUN_NAME:-grpo_$(date +%m%d)}

case "$DEVICE" in
    cuda | npu) ;;
    *)
        echo "unknown DEVICE" >&2
        exit 1
        ;;
esac
if [ "$DEVICE" = npu ] && [ "$ENGINE" = trtllm ]; then
    exit 1
fi

MORE=()
case "$DEVICE" in
    cuda)
        PER_NODE=${PER_NODE:-8}
        memory=0.8
        ;;
    npu)
        export HCCL_CONNECT_TIMEOUT=1200
        PER_NODE=16
        memory=0.6
        MORE+=(
            actor_rollout_ref.actor.use_torch_compile=False
            actor_rollout_ref.rollout.enforce_eager=True
        )
        if [[ $ENGINE == sg* ]]; then
            MORE+=(+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=ascend)
        fi
        ;;
esac

DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$HOME/data/a/train.parquet', '$HOME/data/b/train.parquet']"
    data.train_batch_size=256
    data.max_response_length=$response
)
POLICY=(
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-8B}"
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((512 + response) * 4))
    actor_rollout_ref.rollout.name="$ENGINE"
    actor_rollout_ref.rollout.gpu_memory_utilization=$memory
    actor_rollout_ref.rollout.n=$rollouts
)
TRAINER=(
    trainer.logger='["console"]'
    trainer.experiment_name="$run_name"
    trainer.n_gpus_per_node="$PER_NODE"
)

LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ] && [ "$DEVICE" = cuda ] && { [ "$ENGINE" = vllm ] || [ "$ENGINE" = sglang ]; }; then
    uv sync --frozen
    LAUNCH=(uv run --frozen python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" "${POLICY[@]}" "${TRAINER[@]}" "${MORE[@]}" "$@"
