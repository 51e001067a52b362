"""The parts of a step, put together of the configuration and of what TRL has set up."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from perl.adapters.none import autocast_dtype
from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError
from perl.config.derived import batches_ahead, correction_of, rows_stand
from perl.engines.base import PolicyEngine
from perl.models.folders import token_ids
from perl.models.pixels import image_inputs
from perl.prompts import decode
from perl.records import Sampling
from perl.rewards.functions import GradeEarly
from perl.rewards.score import Rewards
from perl.runs.metrics import model_size
from perl.training.batch import Cycle, Dealer
from perl.training.collect import Collector, compared_reward, read_prompt, rollout_sampling
from perl.training.critic import Critic
from perl.training.engines import Drawing, open_engine
from perl.training.metrics import Metrics
from perl.training.packing import PackingPlan, plan_packing
from perl.training.passes import PASS_TOKENS, Passes, SamplerCheck, Samplers, require_comparable
from perl.training.processes import Processes
from perl.training.step import Step
from perl.training.stream import PromptStream

if TYPE_CHECKING:
    from transformers import GenerationConfig

log = logging.getLogger(__name__)


def make_step(
    trainer: Any, peft_config: Any, generation_kwargs: dict[str, Any], grade_early: GradeEarly | None
) -> Step:
    """
    Args:
        trainer: the PerlGRPOTrainer, which TRL has set up, with its policy, noise and clock.
        peft_config: PEFT's; None: all weights are trained.
        generation_kwargs: the user's.
        grade_early: asked for each completion as soon as it ends.
    """
    config, args, policy, conversations = trainer.config, trainer.args, trainer.policy, trainer.conversations
    processes = Processes(trainer.accelerator)
    metrics = Metrics(processes, trainer._metrics["train"], correction_of(config.rollout))
    plan = plan_packing(policy.bare, args, trainer.aux_loss_enabled, trainer.accelerator.mixed_precision)
    if policy.base_model is not None and plan.packed:  # it scores the same rows
        plan_packing(trainer.accelerator.unwrap_model(policy.base_model), args, False, "no")
    if conversations is not None:
        end_turns(trainer.generation_config, conversations.template.end, trainer._tokenizer)
    sampling = rollout_sampling(args, generation_kwargs)
    engine = open_engine(
        Drawing(
            policy=policy,
            config=config,
            peft_config=peft_config,
            processing=trainer.processing_class,
            generation_config=trainer.generation_config,
            generation_kwargs=generation_kwargs,
            noise=trainer.noise,
            accelerator=trainer.accelerator,
            conversations=conversations,
        )
    )
    require_comparable(engine, sampling, config)
    stand = trainer.aux_loss_enabled or rows_stand(args)
    max_tokens = None if stand or not plan.packed else args.max_tokens_per_microbatch
    passes = _make_passes(trainer, plan, processes, max_tokens)
    samplers = Samplers(engine=engine, passes=passes, processes=processes, noise=trainer.noise)
    critic = None
    if ALGORITHMS[config.algorithm.name].critic:
        critic = _make_critic(trainer, plan, metrics)
        trainer.add_callback(critic.warm_up)
    return Step(
        config=config,
        policy=policy,
        engine=engine,
        collector=_make_collector(trainer, engine, sampling, grade_early, processes),
        samplers=samplers,
        comparison=SamplerCheck.of(
            config,
            samplers=samplers,
            metrics=metrics,
            clock=trainer.clock,
            sampling=sampling,
            itemsize=min(policy.bare.dtype.itemsize, autocast_dtype(args).itemsize),
        ),
        passes=passes,
        dealer=Dealer(
            cycle=Cycle.of(args),
            # Where nothing but the advantage makes a row's gradient.
            leave_out_zero=args.beta == 0.0 and critic is None,
            group=plan.packed,
            fixed=stand,
            max_tokens=max_tokens,
            size=model_size(trainer.model),
        ),
        critic=critic,
        metrics=metrics,
        nonfinite=trainer.nonfinite,
        processes=processes,
        clock=trainer.clock,
        noise_stage=trainer.noise_stage,
        router_coefficient=trainer.router_aux_loss_coef or 0.0,
    )


def end_turns(generation_config: GenerationConfig, token: int, tokenizer: Any) -> None:
    """A base model may end a text by another token than its chat template a turn, and would go on behind that."""
    if token not in (ends := token_ids(generation_config.eos_token_id)):
        name = tokenizer.convert_ids_to_tokens(token)
        log.info("environment: %s, which ends a turn in the chat template, ends a completion too", name)
        generation_config.eos_token_id = [*ends, token]


def _make_passes(trainer: Any, plan: PackingPlan, processes: Processes, max_tokens: int | None) -> Passes:
    return Passes(
        policy=trainer.policy,
        packed=plan.packed,
        kernel=plan.kernel,
        aux_loss=trainer.aux_loss_enabled,
        max_tokens=max_tokens or PASS_TOKENS,
        processes=processes,
        clock=trainer.clock,
        pad_token_id=int(trainer._tokenizer.pad_token_id),
        image_inputs=lambda row: image_inputs(trainer.processing_class, row.images) if row.images else None,
    )


def _make_collector(
    trainer: Any,
    engine: PolicyEngine,
    sampling: Sampling,
    grade_early: GradeEarly | None,
    processes: Processes,
) -> Collector:
    args, algorithm, conversations = trainer.args, trainer.config.algorithm, trainer.conversations
    per_batch = (args.generation_batch_size or 1) // (args.num_generations or 1)
    dynamic, rows = algorithm.dynamic_sampling, trainer.train_dataset
    epochs = args.num_train_epochs if dynamic and args.max_steps <= 0 else None
    text = functools.partial(decode, trainer.processing_class)
    return Collector(
        stream=PromptStream(len(rows), per_batch, args.seed, epochs, trainer.shuffle_dataset),
        rows=rows,
        read=functools.partial(
            read_prompt, tokenizer=trainer._tokenizer, template=trainer.template, data=trainer.config.dataset
        ),
        text=text,
        engine=engine,
        sampling=sampling,
        rewards=Rewards(
            trainer.reward_funcs,
            trainer.reward_func_names,
            trainer.reward_weights,
            decode=text if conversations else None,
        ),
        grade_early=grade_early,
        batch=per_batch,
        group_size=args.num_generations or 1,
        processes=processes,
        clock=trainer.clock,
        state=lambda: trainer.state,
        greedy=ALGORITHMS[algorithm.name].greedy,
        max_resample_factor=algorithm.max_resample_factor if dynamic else None,
        equal_by=compared_reward(algorithm.dynamic_sampling_metric, trainer.reward_func_names) if dynamic else None,
        conversations=conversations,
        longest=_context(trainer) if conversations else None,
        batches_ahead=batches_ahead(trainer.config.rollout),
    )


def _context(trainer: Any) -> int | None:
    """Tokens of a prompt and all that follows it: what the model was made for, or less where vLLM is given less."""
    made_for = getattr(trainer.policy.bare.config.get_text_config(), "max_position_embeddings", None)
    given = trainer.args.vllm_max_model_length if trainer.args.use_vllm else None
    return min((each for each in (made_for, given) if each is not None), default=None)


def _make_critic(trainer: Any, plan: PackingPlan, metrics: Metrics) -> Critic:
    config, policy = trainer.config, trainer.policy.bare
    if not plan.packed:
        raise UserError(
            f"--config.algorithm.name {config.algorithm.name}: the critic's values are computed in packed"
            " micro-batches, which this model can't have (the log says why); use --config.algorithm.name grpo"
        )
    dtype = policy.dtype if is_deepspeed_zero3_enabled() else torch.float32
    return Critic(policy, config.critic, metrics, dtype, trainer.args.seed)
