"""verl's keys: what each becomes here. A further key is one line in KEYS, a family of keys one in FAMILIES."""

from __future__ import annotations

import re

from perl.tools.from_verl import batch as arithmetic
from perl.tools.from_verl.handlers import (
    ACTOR,
    MODEL,
    ROLLOUT,
    SPEED,
    adaptive,
    aggregation,
    all_tokens,
    backend,
    batch_field,
    betas,
    by_group,
    chat_template,
    clip_end,
    clip_ratio,
    completion_length,
    critic,
    critic_warmup,
    custom_reward,
    devices,
    discounted,
    dynamic_batches,
    eager,
    engine,
    epochs,
    estimator,
    full_parameters,
    group_size,
    importance_cap,
    importance_correction,
    in_reward,
    is_sapo,
    kl_control,
    kl_in_reward,
    kl_loss,
    kl_penalty,
    kl_type,
    learning_rate,
    lora_modules,
    megatron_lora_modules,
    model_dtype,
    model_settings,
    noise,
    offload,
    overlong,
    policy_loss,
    prompts_as,
    report_to,
    resume,
    reward_functions,
    reward_kwargs,
    reward_manager,
    rollout_batch,
    same_as,
    save_frequency,
    schedule,
    test_frequency,
    top_k,
    total_steps,
    validated,
    validation_temperature,
    vllm_only,
    whole_micro_batch,
    with_lora,
)
from perl.tools.from_verl.outcomes import (
    Handler,
    NoEffect,
    no_effect,
    number,
    one_or_more,
    only,
    path,
    paths,
    positive,
    refused,
    text,
    to,
    where,
    whole,
    yes_or_no,
)

KEYS: dict[str, Handler] = {
    # batch
    "data.train_batch_size": batch_field("training.steps_per_generation", arithmetic.PROMPTS),
    "data.gen_batch_size": rollout_batch,
    "data.val_batch_size": no_effect(SPEED),
    f"{ACTOR}.ppo_mini_batch_size": batch_field("training.gradient_accumulation_steps", arithmetic.MINI),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": batch_field("training.per_device_train_batch_size", arithmetic.MICRO),
    f"{ACTOR}.ppo_micro_batch_size": whole_micro_batch,
    f"{ACTOR}.use_dynamic_bsz": dynamic_batches,
    f"{ACTOR}.ppo_max_token_len_per_gpu": where(
        lambda verl: verl[f"{ACTOR}.use_dynamic_bsz"],
        to("training.max_tokens_per_microbatch", positive),
        "use_dynamic_bsz is False",
    ),
    f"{ACTOR}.ppo_epochs": to("training.num_iterations", positive),
    f"{ROLLOUT}.n": group_size,
    "trainer.n_gpus_per_node": devices,
    "trainer.nnodes": devices,
    # data
    "data.train_files": to("dataset.dataset_name_or_path", lambda value: one_or_more(paths(value))),
    "data.val_files": validated(to("validation.datasets", paths)),
    "data.train_max_samples": lambda value, verl: (
        NoEffect("-1: all rows") if value in (-1, None) else to("dataset.example_numbers", positive)(value, verl)
    ),
    "data.val_max_samples": lambda value, verl: (
        NoEffect("-1: all rows")
        if value in (-1, None)
        else validated(to("validation.max_samples", positive))(value, verl)
    ),
    "data.max_prompt_length": to("dataset.max_prompt_length", positive),
    "data.max_response_length": completion_length,
    "data.filter_overlong_prompts": to("dataset.filter_overlong_prompts", yes_or_no),
    "data.filter_overlong_prompts_workers": no_effect(SPEED),
    "data.truncation": prompts_as,
    "data.shuffle": to("training.shuffle_dataset", yes_or_no),
    "data.validation_shuffle": no_effect("the order of validation rows changes no score"),
    "data.seed": lambda value, verl: NoEffect("null") if value is None else to("common.seed", whole)(value, verl),
    "data.prompt_key": only(
        "prompt", why="the column that is read here too", otherwise="name the column prompt (or question)"
    ),
    "data.image_key": only("images", why="the column that is read here too", otherwise="name the column images"),
    "data.reward_fn_key": only(
        "data_source", why="the column that is read here too", otherwise="name the column data_source"
    ),
    "data.tokenizer": refused("the tokenizer of the model's folder is taken", None),
    "data.custom_cls.path": refused("a dataset class of your own is not loaded; write its rows to a file"),
    "data.tool_config_path": refused("tools during rollouts are not there"),
    "data.function_tool_path": refused("tools during rollouts are not there"),
    "data.trust_remote_code": no_effect("models and tokenizers are loaded by transformers' own code"),
    # algorithm and loss
    "algorithm.adv_estimator": estimator,
    "algorithm.norm_adv_by_std_in_grpo": where(
        by_group,
        to("training.scale_rewards", lambda value: "group" if yes_or_no(value) else "none"),
        "in verl too: adv_estimator has a scale of its own",
    ),
    "algorithm.use_kl_in_reward": kl_in_reward,
    "algorithm.kl_penalty": in_reward(kl_penalty),
    "algorithm.kl_ctrl.kl_coef": in_reward(to("algorithm.kl_in_reward", number)),
    "algorithm.kl_ctrl.type": in_reward(kl_control),
    "algorithm.kl_ctrl.target_kl": in_reward(
        where(adaptive, to("algorithm.kl_in_reward_target", number), "kl_ctrl.type is fixed")
    ),
    "algorithm.kl_ctrl.horizon": in_reward(
        where(adaptive, to("algorithm.kl_in_reward_horizon", positive), "kl_ctrl.type is fixed")
    ),
    "algorithm.gamma": where(discounted, to("algorithm.gamma", number), "in verl too: adv_estimator discounts nothing"),
    "algorithm.lam": no_effect("it is GAE's, which is PPO's"),
    "algorithm.filter_groups.enable": refused(
        "dynamic sampling is not there; groups of equal rewards cost no update here, but are not replaced; write False"
    ),
    "algorithm.use_pf_ppo": refused("preference-feedback PPO is not there"),
    "algorithm.rollout_correction.rollout_is": importance_correction,
    "algorithm.rollout_correction.rollout_is_threshold": where(
        lambda verl: verl["algorithm.rollout_correction.rollout_is"],
        to("training.vllm_importance_sampling_clip_max", number),
        "rollout_is is off",
    ),
    "algorithm.rollout_correction.rollout_rs": refused("rejection of rows by their ratio is not there"),
    "algorithm.rollout_correction.bypass_mode": refused("the trainer's own log-probabilities are always computed"),
    f"{ACTOR}.tis_imp_ratio_cap": importance_cap,
    f"{ACTOR}.use_kl_loss": kl_loss,
    f"{ACTOR}.kl_loss_coef": where(lambda verl: verl[f"{ACTOR}.use_kl_loss"], kl_loss, "use_kl_loss is False"),
    f"{ACTOR}.kl_loss_type": where(lambda verl: verl[f"{ACTOR}.use_kl_loss"], kl_type, "use_kl_loss is False"),
    f"{ACTOR}.entropy_coeff": to("training.entropy_coef", number),
    f"{ACTOR}.clip_ratio": clip_ratio,
    f"{ACTOR}.clip_ratio_low": clip_end("training.epsilon"),
    f"{ACTOR}.clip_ratio_high": clip_end("training.epsilon_high"),
    f"{ACTOR}.clip_ratio_c": to("training.delta", number),
    f"{ACTOR}.loss_agg_mode": aggregation,
    f"{ACTOR}.loss_scale_factor": refused("another scale than the length of a completion is not there"),
    f"{ACTOR}.policy_loss.loss_mode": policy_loss,
    f"{ACTOR}.tau_pos": where(is_sapo, to("training.sapo_temperature_pos", number), "the loss sapo alone has it"),
    f"{ACTOR}.tau_neg": where(is_sapo, to("training.sapo_temperature_neg", number), "the loss sapo alone has it"),
    f"{ACTOR}.shuffle": no_effect("the rows of a rollout are always shuffled before they are cut into updates"),
    f"{ACTOR}.freeze_vision_tower": no_effect("there is no vision tower"),
    # optimizer
    f"{ACTOR}.optim.lr": learning_rate,
    f"{ACTOR}.optim.weight_decay": to("training.weight_decay", number),
    f"{ACTOR}.optim.betas": betas,
    f"{ACTOR}.optim.lr_scheduler_type": schedule,
    f"{ACTOR}.optim.warmup_style": schedule,
    f"{ACTOR}.optim.lr_decay_style": schedule,
    f"{ACTOR}.optim.lr_warmup_steps": schedule,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": schedule,
    f"{ACTOR}.optim.min_lr_ratio": schedule,
    f"{ACTOR}.optim.num_cycles": only(0.5, why="half a cosine, as here", otherwise="only half a cosine (0.5) is there"),
    f"{ACTOR}.optim.total_training_steps": no_effect("the schedule is as long as the run"),
    f"{ACTOR}.optim.clip_grad": to("training.max_grad_norm", number),
    f"{ACTOR}.optim.optimizer": only("AdamW", "adam", why="AdamW, as here", otherwise="only AdamW is there"),
    f"{ACTOR}.optim.optimizer_impl": only("torch.optim", why="AdamW, as here", otherwise="only torch's is there"),
    f"{ACTOR}.optim.override_optimizer_config": refused("other settings of the optimizer are not taken over"),
    f"{ACTOR}.grad_clip": to("training.max_grad_norm", number),
    # how the actor is spread over devices
    f"{ACTOR}.strategy": backend,
    "actor_rollout_ref.ref.strategy": backend,
    f"{ACTOR}.fsdp_config.param_offload": offload,
    f"{ACTOR}.fsdp_config.optimizer_offload": offload,
    f"{ACTOR}.fsdp_config.offload_policy": offload,
    f"{ACTOR}.fsdp_config.model_dtype": model_dtype,
    f"{ACTOR}.ulysses_sequence_parallel_size": no_effect(
        "how a sequence is spread over devices; here each has whole ones"
    ),
    "model_engine": only("dp", why="FSDP, verl's default", otherwise="only dp, as with FSDP, is there"),
    # model
    f"{MODEL}.path": to("model.model_name_or_path", path),
    f"{MODEL}.enable_gradient_checkpointing": to("training.gradient_checkpointing", yes_or_no),
    f"{MODEL}.use_remove_padding": no_effect("packing: the loss is the same either way"),
    f"{MODEL}.lora_rank": full_parameters,
    f"{MODEL}.lora_alpha": with_lora(to("peft.lora_alpha", positive)),
    f"{MODEL}.target_modules": with_lora(lora_modules),
    f"{MODEL}.exclude_modules": with_lora(
        lambda value, verl: to("peft.exclude_modules")(value, verl) if value else NoEffect("null: as it is here")
    ),
    f"{MODEL}.lora_adapter_path": lambda value, verl: (
        to("peft.adapter", path)(value, verl) if value else NoEffect("null: a new adapter is trained")
    ),
    f"{MODEL}.lora.rank": lambda value, verl: to("peft.r", positive)(value, verl) if value else NoEffect("0: off"),
    f"{MODEL}.lora.alpha": with_lora(to("peft.lora_alpha", positive)),
    f"{MODEL}.lora.dropout": with_lora(to("peft.lora_dropout", number)),
    f"{MODEL}.lora.target_modules": with_lora(megatron_lora_modules),
    f"{MODEL}.lora.type": with_lora(only("lora", why="LoRA", otherwise="only lora is there")),
    f"{MODEL}.override_config.attn_implementation": to("model.attn_implementation", text),
    f"{MODEL}.override_config": model_settings,
    f"{MODEL}.tokenizer_path": refused("the tokenizer of the model's folder is taken"),
    f"{MODEL}.hf_config_path": refused("the configuration of the model's folder is taken"),
    f"{MODEL}.custom_chat_template": refused("the chat template of the tokenizer is taken; write it there"),
    f"{MODEL}.external_lib": refused("a module of your own is not imported"),
    # rollouts
    f"{ROLLOUT}.name": engine,
    f"{ROLLOUT}.temperature": to("training.temperature", number),
    f"{ROLLOUT}.top_p": to("training.top_p", number),
    f"{ROLLOUT}.top_k": top_k,
    f"{ROLLOUT}.do_sample": only(
        True, why="completions are sampled", otherwise="greedy completions of a group are one"
    ),
    f"{ROLLOUT}.ignore_eos": refused("a completion ends with its end-of-sequence token"),
    f"{ROLLOUT}.dtype": no_effect("completions are sampled from the trainer's own weights: model.dtype"),
    f"{ROLLOUT}.tensor_model_parallel_size": vllm_only(
        "training.vllm_tensor_parallel_size", "each device samples with a whole model"
    ),
    f"{ROLLOUT}.gpu_memory_utilization": vllm_only(
        "training.vllm_gpu_memory_utilization", "the nearest is rollout.max_batch_tokens, most tokens of KV cache"
    ),
    f"{ROLLOUT}.max_model_len": vllm_only(
        "training.vllm_max_model_length", "prompt and completion have limits of their own"
    ),
    f"{ROLLOUT}.enforce_eager": eager,
    f"{ROLLOUT}.free_cache_engine": no_effect(SPEED),
    f"{ROLLOUT}.prompt_length": same_as("data.max_prompt_length"),
    f"{ROLLOUT}.response_length": same_as("data.max_response_length"),
    f"{ROLLOUT}.quantization_config_file": refused("rollouts sample from the trainer's own weights, not quantized"),
    f"{ROLLOUT}.quantization": refused("rollouts sample from the trainer's own weights, not quantized"),
    f"{ROLLOUT}.multi_turn.enable": refused("rollouts of several turns with tools are not there"),
    f"{ROLLOUT}.agent.default_agent_loop": only(
        "single_turn_agent", why="one turn, as here", otherwise="agents and tools during rollouts are not there"
    ),
    f"{ROLLOUT}.val_kwargs.n": validated(to("validation.n", positive)),
    f"{ROLLOUT}.val_kwargs.temperature": validated(validation_temperature),
    f"{ROLLOUT}.val_kwargs.do_sample": validated(validation_temperature),
    f"{ROLLOUT}.val_kwargs.top_p": validated(all_tokens),
    f"{ROLLOUT}.val_kwargs.top_k": validated(all_tokens),
    # rewards
    "custom_reward_function.path": reward_functions,
    "custom_reward_function.name": custom_reward,
    "reward.custom_reward_function.path": custom_reward,
    "reward.custom_reward_function.name": custom_reward,
    "reward_model.enable": refused("a reward model is not there; rewards are functions"),
    "reward.reward_model.enable": refused("a reward model is not there; rewards are functions"),
    "reward_model.reward_manager": reward_manager,
    "reward_manager.name": reward_manager,
    "reward.reward_manager.name": reward_manager,
    "reward.reward_manager.source": only("register", why="verl's own", otherwise="only verl's own are known"),
    # trainer
    "trainer.total_epochs": epochs,
    "trainer.total_training_steps": total_steps,
    "trainer.save_freq": save_frequency,
    "trainer.test_freq": validated(test_frequency),
    "trainer.val_before_train": validated(to("validation.before_train", yes_or_no)),
    "trainer.val_only": refused("python perl/eval.py evaluates without training"),
    "trainer.critic_warmup": critic_warmup,
    "trainer.logger": report_to,
    "trainer.project_name": to("logging.wandb_project", text),
    "trainer.experiment_name": to("training.run_name", text),
    "trainer.default_local_dir": to("training.output_dir", path),
    "trainer.max_actor_ckpt_to_keep": lambda value, verl: (
        NoEffect("null: all are kept") if not value else to("training.save_total_limit", positive)(value, verl)
    ),
    "trainer.max_critic_ckpt_to_keep": critic,
    "trainer.resume_mode": resume,
    "trainer.resume_from_path": refused("a checkpoint of verl holds another model than an adapter"),
    "trainer.device": no_effect("the device is detected"),
    "trainer.noise_injection.enabled": noise("enabled"),
    "trainer.noise_injection.sigma_start": noise("sigma_start"),
    "trainer.noise_injection.sigma_end": noise("sigma_end"),
    "trainer.noise_injection.num_stages": noise("num_stages"),
    "trainer.noise_injection.target_modules": noise("target_modules"),
    "trainer.noise_injection.exclude_patterns": noise("exclude_patterns"),
    "distillation.enabled": refused("distillation from a teacher is not there"),
    "transfer_queue.enable": no_effect(SPEED),
}
"""Key of verl -> what becomes of its value."""

FAMILIES: tuple[tuple[str, Handler], ...] = (
    (r"data\.apply_chat_template_kwargs(\..+)?", chat_template),
    (r"data\.custom_cls\..+", refused("a dataset class of your own is not loaded; write its rows to a file")),
    (r"data\.((video|audio)_key|return_.*)", no_effect("texts and images are read, as messages")),
    (r"data\.image_patch_size", no_effect("the model's image processor knows it")),
    (r"data\.mm_processor_kwargs(\..+)?", refused("images are made as the model's image processor says by itself")),
    (r"data\.(use_shm|dataloader_num_workers|cache_dir)", no_effect(SPEED)),
    (r"data\.sampler\..+|data\.datagen\..+", refused("another order of the rows is not there")),
    (r"algorithm\.filter_groups\..+", no_effect("only filter_groups.enable, which is refused, uses it")),
    (r"algorithm\.pf_ppo\..+", no_effect("use_pf_ppo is False")),
    (r"algorithm\.rollout_correction\..+", no_effect("it has an effect only with rollout_is or rollout_rs")),
    (r"actor_rollout_ref\.(hybrid_engine|nccl_timeout)", no_effect("rollouts and training share the devices")),
    (r"actor_rollout_ref\.(actor|ref)\.megatron\.override_transformer_config\..+", refused(
        "a setting of Megatron's (MindSpeed's) layers; the nearest is --config.model.attn_implementation, which takes"
        " sdpa and flash_attention_2")),
    (r"(actor_rollout_ref\.(actor|ref)|critic|reward_model)\.megatron\..+", no_effect(
        "how Megatron spreads the model; accelerate's file decides that here")),
    (r"actor_rollout_ref\.actor\.optim\.(min_lr|lr_decay_steps)", refused("the nearest is optim.min_lr_ratio")),
    (r"actor_rollout_ref\.actor\.optim\.(weight_decay_incr_style|lr_wsd_.*|use_.*|main_grads_dtype|exp_avg.*|muon_.*)",
     no_effect("of Megatron's optimizer, and AdamW is taken")),
    (r"actor_rollout_ref\.rollout\.mtp(\..+)?", no_effect("only model.mtp.enable, which is refused, uses it")),
    (r"actor_rollout_ref\.actor\.optim\.(zero_indexed_step|lr_warmup_init)", no_effect("the schedule's first step")),
    (r"actor_rollout_ref\.actor\.policy_loss\..+", no_effect("it belongs to losses other than vanilla, gspo and sapo")),
    (r"actor_rollout_ref\.(actor|ref)\.fsdp_config\..+", no_effect("how weights are spread and gathered: " + SPEED)),
    (r"actor_rollout_ref\.(actor|ref)\.(use_torch_compile|use_fused_kernels|entropy_from_logits.*|entropy_checkpointing"
     r"|pad_to_length|use_remove_padding|use_prefix_grouper|calculate_.*|rollout_n|data_loader_.*)", no_effect(SPEED)),
    (r"(actor_rollout_ref\.actor|critic)\.(checkpoint|qat|profiler|load_weight)(\..+)?", no_effect(
        "what verl writes, not what it computes")),
    (r"actor_rollout_ref\.(ref|rollout)\.(log_prob_.*|ulysses_.*|entropy_.*|profiler.*|checkpoint.*|load_weight|"
     r"rollout_n|pad_to_length.*|use_.*)", no_effect("passes without gradient: " + SPEED)),
    (r"actor_rollout_ref\.ref\.model\..+", refused("another reference than the base is not there")),
    (r"actor_rollout_ref\.ref\..+", no_effect("how the reference is held: memory only")),
    (r"actor_rollout_ref\.model\.override_config\..+", refused("a changed architecture is not taken over")),
    (r"actor_rollout_ref\.model\.(mtp\.enable|mtp\.enable_train)", refused("multi-token prediction is not there")),
    (r"actor_rollout_ref\.model\.(lora|mtp|tiled_mlp|fused_kernel_options)\..+", no_effect(SPEED)),
    (r"actor_rollout_ref\.model\.(use_shm|use_liger|use_fused_kernels|enable_activation_offload)", no_effect(SPEED)),
    (r"actor_rollout_ref\.model\.trust_remote_code", no_effect(
        "models and tokenizers are loaded by transformers' own code")),
    (r"actor_rollout_ref\.rollout\.multi_turn\..+", no_effect("only multi_turn.enable, which is refused, uses it")),
    (r"actor_rollout_ref\.rollout\.(mode|nnodes|n_gpus_per_node|.*parallel_size|max_num_.*|enable_chunked_prefill|"
     r"enable_prefix_caching|scheduling_policy|load_format|layered_summon|disable_log_.*|cudagraph_.*|update_weights_.*|"
     r"swap_space|logprobs_mode|calculate_log_probs|full_determinism|seed|over_sample_rate|multi_stage_wake_up|"
     r"skip_.*|router_.*|moe_.*|enable_rollout_.*|use_.*|micro_batch_size)", no_effect("the engine's: " + SPEED)),
    (r"actor_rollout_ref\.rollout\.(engine_kwargs|agent|trace|prometheus|checkpoint_engine|server|profiler|"
     r"disaggregation|qat)(\..+)?", no_effect("the engine's: " + SPEED)),
    (r"(reward_model|reward)\.(overlong_buffer|reward_kwargs\.overlong_buffer_cfg)\..+", overlong),
    (r"(reward_model|reward)\.reward_kwargs\.max_resp_len", no_effect("data.max_response_length")),
    (r"(reward\.)?custom_reward_function\.reward_kwargs\..+", reward_kwargs),
    (r"(reward_model|reward)\.reward_kwargs\..+", refused("arguments of a reward manager are not there")),
    (r"(reward_model|reward)\.(num_workers|launch_reward_fn_async|max_concurrent.*|timeout)", no_effect(SPEED)),
    (r"(reward_model|reward\.reward_model)\..+", no_effect("a reward model's, and enabling one is refused")),
    (r"reward\.reward_manager\..+", no_effect("it names a reward manager of your own, which source decides")),
    (r"(reward\.)?sandbox_fusion\.url", refused("a sandbox for code is not there")),
    (r"(reward\.)?sandbox_fusion\..+", no_effect("only sandbox_fusion.url, which is refused, uses it")),
    (r"critic\..+", critic),
    (r"trainer\.(balance_batch|esi_.*|ray_.*|use_legacy_worker_impl|use_v1|worker_.*|del_local_.*|checkpoint_callback_.*)",
     no_effect(SPEED)),
    (r"trainer\.(log_val_generations|rollout_data_dir|validation_data_dir|default_hdfs_dir|wandb_proxy|hf_.*|"
     r"remove_previous_ckpt_.*|rollout_dump.*|profile_steps)", no_effect("what verl writes, not what it computes")),
    (r"trainer\.v1\..+", no_effect(SPEED)),
    (r"(ray_kwargs|ray_init|global_profiler|profiler|skip|transfer_queue|async_training)(\..+)?", no_effect(
        "Ray, profilers and queues: none here")),
    (r"distillation\..+", no_effect("distillation is off")),
)  # fmt: skip
"""(pattern of whole keys, what becomes of them), for keys that are not in KEYS; the first that fits."""

ALWAYS = (
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.filter_overlong_prompts",
    "data.truncation",
    "data.shuffle",
    f"{MODEL}.path",
    f"{MODEL}.enable_gradient_checkpointing",
    f"{MODEL}.lora_rank",
    f"{MODEL}.lora_alpha",
    f"{MODEL}.target_modules",
    f"{ACTOR}.optim.lr",
    f"{ACTOR}.optim.lr_scheduler_type",
    f"{ACTOR}.optim.weight_decay",
    f"{ACTOR}.optim.betas",
    f"{ACTOR}.grad_clip",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.ppo_epochs",
    f"{ACTOR}.use_kl_loss",
    f"{ACTOR}.kl_loss_type",
    f"{ACTOR}.entropy_coeff",
    f"{ACTOR}.clip_ratio_low",
    f"{ACTOR}.clip_ratio_high",
    f"{ACTOR}.clip_ratio_c",
    f"{ACTOR}.loss_agg_mode",
    f"{ACTOR}.policy_loss.loss_mode",
    f"{ROLLOUT}.name",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.temperature",
    f"{ROLLOUT}.top_p",
    f"{ROLLOUT}.top_k",
    f"{ROLLOUT}.val_kwargs.n",
    f"{ROLLOUT}.val_kwargs.temperature",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.val_before_train",
    "trainer.logger",
    "custom_reward_function.path",
)
"""Keys whose default is written out where the user gives none: they decide the result."""

NAMES = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")
"""Keys that name a run: where only a run of the script would show the name, the run is named here."""


def handler_of(key: str) -> Handler | None:
    """What decides about a key; None for one that verl does not have, or that nobody has looked at."""
    if key in KEYS:
        return KEYS[key]
    return next((handler for pattern, handler in FAMILIES if re.fullmatch(pattern, key)), None)


ENVIRONMENT = {
    "VERL_USE_MODELSCOPE": "read here too: models come from ModelScope",
    "PERL_USE_MODELSCOPE": "read here too: models come from ModelScope",
    "WANDB_MODE": "read here too",
    "WANDB_PROJECT": "read here too",
    "WANDB_ENTITY": "read here too",
    "HF_ENDPOINT": "read here too",
    "HF_HOME": "read here too",
    "HF_HUB_OFFLINE": "read here too",
    "ASCEND_RT_VISIBLE_DEVICES": "read here too",
    "CUDA_VISIBLE_DEVICES": "read here too",
}
"""Variables that mean the same here, and stand before the printed command; others have no effect."""
NO_VARIABLE = {
    "RAY_": "Ray's; there is no Ray in a training here",
    "VLLM_": "vLLM's; speed only",
    "VERL_": "verl's own",
    "HYDRA_": "Hydra's messages",
    "HCCL_": "the launch script sets what Ascend needs; export it to set another value",
    "NCCL_": "NCCL's; speed only",
    "TORCH": "torch's; speed only",
    "PYTHON": "Python's: how it prints, where it finds modules",
    "TOKENIZERS_PARALLELISM": "the launch script sets it",
    "CUDA_DEVICE_MAX_CONNECTIONS": "Megatron's; speed only",
}
"""Start of a variable's name -> why it has no effect here."""
