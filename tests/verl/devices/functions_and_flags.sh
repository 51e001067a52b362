#!/bin/bash
# Flags of the script's own, functions with local variables, exec.
size=small
while [ $# -gt 0 ]; do
    case "$1" in
        --large) size=large ;;
        --) shift; break ;;
        *) break ;;
    esac
    shift
done
is_large() { [ "$size" = large ]; }
pick() {
    local size=1
    [ -n "${BATCH:-}" ] && { batch=$BATCH; return; }
    batch=$((size * 128))
}
pick
if is_large; then
    model=Qwen/Qwen2.5-7B-Instruct
elif (( batch > 64 )); then
    model=Qwen/Qwen2.5-0.5B-Instruct
else
    model=none
fi
command -v jemalloc-config > /dev/null && preload=1 || preload=0
[[ -d $HOME/data ]] || mkdir -p "$HOME/data"
eval "$(conda shell.bash hook)"
main() {
    cd "$(dirname "$0")" || exit 1
    exec env HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo \
        algorithm.adv_estimator=rloo \
        data.train_batch_size="$batch" \
        data.train_files=<your file>/train.parquet \
        actor_rollout_ref.model.path=$model \
        actor_rollout_ref.actor.ppo_mini_batch_size=64 \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
        actor_rollout_ref.rollout.n=4 \
        trainer.nnodes=1 "$@"
}
main "$@"
