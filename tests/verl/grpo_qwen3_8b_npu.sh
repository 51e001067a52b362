# verl's examples/grpo_trainer/run_qwen3-8b_npu.sh: those of its keys that mean something here, with their values
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/verl/data/dapo-math-17k.parquet data.val_files=$HOME/verl/data/aime-2024.parquet \
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \
    data.filter_overlong_prompts=True data.truncation=error \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    algorithm.use_kl_in_reward=False trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' trainer.project_name=GRPO trainer.experiment_name=GRPO-Qwen3-8B-npu \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.device=npu \
    trainer.val_before_train=True trainer.save_freq=5 trainer.test_freq=5 trainer.total_epochs=15
