#!/bin/bash
#SBATCH --nodes=2
# a heredoc and a subshell on the way
cat <<NOTE > /tmp/note.txt
python3 -m verl.trainer.main_ppo is started below
NOTE
nodes_array=($(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' '))
head_node=${nodes_array[0]}
for i in 1 2; do
    FILES="${FILES:+$FILES,}'/data/part${i}.parquet'"
done
(
cd /verl && PYTHONUNBUFFERED=1 srun --overlap --nodes=1 -w "$head_node" \
    python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    "data.train_files=[$FILES]" \
    data.val_files=/data/val.parquet \
    data.train_batch_size=256 \
    actor_rollout_ref.model.path=/models/llama \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.clip_ratio=0.1 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.val_kwargs.n=16 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    trainer.test_freq=10 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=2
)
