"""What a model says of trajectories: log-probabilities and entropies of their tokens, and a critic's values.

    Passes.score          a micro-batch, with its gradient
    Passes.logps          all of a batch, without one: by the policy before its updates, the reference
    Passes.values         the critic's, of all of a batch
    Samplers.logps        by the policies that drew: the weights and noise of their versions, a base not quantised
    SamplerCheck.compare  the engine's log-probabilities with those: another policy ends the run; what lies between the
                          policy that drew and the one that is trained is measured

Rows are lists of tokens on the host. They go to the device once for each forward: packed into one sequence, where the
model takes that (perl.training.packing), or padded into a rectangle. Nothing is read back.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from perl.base.errors import RunError, UserError
from perl.config.derived import batches_ahead, correction_of
from perl.device import to_device
from perl.engines.base import evaluation_mode
from perl.engines.scheduler import left_pad
from perl.models.pixels import image_arguments
from perl.runs.metrics import StepClock, Work, sequences
from perl.training.batch import Batch, by_prompt, cut_by_tokens, row_cost
from perl.training.metrics import Metrics, difference
from perl.training.packing import TokenOutputs, forward_arguments, pack, packed_work

if TYPE_CHECKING:
    from perl.config.load import Config
    from perl.device import Kernel
    from perl.engines.base import PolicyEngine
    from perl.noise.injector import NoiseInjector
    from perl.records import Sampling, Trajectory, Weights
    from perl.training.packing import Reader
    from perl.training.policy import Policy
    from perl.training.processes import Processes

log = logging.getLogger(__name__)

COMPARED_ROWS = 4
"""Completions of each process that sampler and trainer are compared on before the first optimizer step, at least; of
more pieces than these, one of each."""
TOLERANCE: dict[float, float] = {4: 1e-3, 2: 0.2, 1: 0.5, 0.5: 2.0}
"""Largest mean difference between the sampler's and the trainer's log-probabilities, in nats, by bytes of the numbers
that are computed with. Float32 differs in the order of sums alone: 24 bits leave a logit of 20 about 1e-6, and some
hundred sums in a row less than a hundred times that. In bfloat16, of 8 bits, sampler and trainer round the same outputs
at different places (autocast, packing, the cache): random weights, whose every token is improbable and shows the
logit's whole error, were 0.005 apart at 28 M, 0.014 at Qwen2.5-0.5B's shape and 0.029 at 1.5B's; a quarter of 7B's
layers, 0.020, makes 0.06 of all. A sampler of int8 or int4 weights is another policy (0.06 to 0.8 nats apart on
SmolLM2-135M, docs/quantised.md): its bound tells a broken one alone."""
EFFECT, ABOVE, SHARE, BEYOND = 0.01, 4.0, 0.5, 20.0
"""Within TOLERANCE a worker may still draw without its adapter, which may change less than that. But rounding does not
point where the adapter does: sampler minus trainer, as a vector over the tokens of a row or of all rows, is not to have
SHARE of what leaving out the adapter would change, to that side or the other, and that share is to be BEYOND times the
root mean square of rounding, so that there are tokens enough. Asked where the adapter changes a token by EFFECT nats on
average, and by ABOVE times that root mean square: the trainer's own rounding is in both vectors, and of a smaller
change it makes half."""
PASS_TOKENS = 16_384
"""Tokens of a forward without a gradient, where max_tokens_per_microbatch does not say: its activations are freed layer
by layer."""


@dataclass(slots=True, kw_only=True)
class Passes:
    """Forwards of a model with TRL's fused head.

    A pass over a batch has as many forwards on every process: with weights that are split (ZeRO-3, FSDP2) each of them
    gathers those of all.
    """

    policy: Policy
    packed: bool
    """Rows are packed where that saves tokens; needs `enable_packing`."""
    kernel: Kernel | None
    """Of packed attention; None is sdpa."""
    aux_loss: bool
    """The loss has a router's auxiliary loss."""
    max_tokens: int = PASS_TOKENS
    processes: Processes
    clock: StepClock
    pad_token_id: int = 0
    image_inputs: Callable[[Trajectory], Any] = field(default=lambda row: None)
    """Of a row's images (perl.models.pixels.ImageInputs); None: it has none."""

    def score(
        self, model: Any, rows: Sequence[Trajectory], width: int, readers: Sequence[Reader] = ("policy",)
    ) -> TokenOutputs:
        """One forward over a micro-batch, of all its readers together."""
        with self.policy.autocast():
            outputs, work = self.forward(model, rows, width, readers)
        self.clock.count_update(work)
        return outputs

    @torch.no_grad()
    def logps(self, model: Any, rows: Sequence[Trajectory], width: int) -> torch.Tensor:
        """float32 [rows, width], in nats: by `model` as it is, wrapped or not. Every process must come here."""
        return self._by_chunks(rows, lambda chunk: self.forward(model, chunk, width), "logps")

    @torch.no_grad()
    def values(self, model: Any, rows: Sequence[Trajectory], width: int) -> torch.Tensor:
        """float32 [rows, width]: by the policy's critic. Every process must come here."""
        with evaluation_mode(model):
            return self._by_chunks(rows, lambda chunk: self.forward(model, chunk, width, ("critic",)), "values")

    def _by_chunks(
        self,
        rows: Sequence[Trajectory],
        forward: Callable[[Sequence[Trajectory]], tuple[TokenOutputs, Work]],
        wanted: str,
    ) -> torch.Tensor:
        chunks = list((by_tokens if self.packed else by_area)(rows, self.max_tokens))
        parts: list[torch.Tensor] = []
        with self.policy.without_checkpointing(), self.policy.autocast():
            for index in range(self.processes.largest([len(chunks)])[0]):
                outputs, work = forward([rows[place] for place in chunks[min(index, len(chunks) - 1)]])
                if index < len(chunks):
                    parts.append(getattr(outputs, wanted).float())
                self.clock.count_forward(work)
        order = torch.tensor(list(itertools.chain(*chunks)))
        return torch.cat(parts)[order.argsort().to(parts[0].device)]

    def forward(
        self, model: Any, rows: Sequence[Trajectory], width: int, readers: Sequence[Reader] = ("policy",)
    ) -> tuple[TokenOutputs, Work]:
        """One over `rows`, for the critic always packed, and what it has computed."""
        prompt = max(len(row.prompt_ids) for row in rows)
        completion = max(1, *(len(row.token_ids) for row in rows))
        shorter = packed_work(rows).tokens < len(rows) * (prompt + completion)
        if "critic" not in readers and not (self.packed and shorter):
            return self._padded(model, rows, completion, width)
        packed = pack(rows, width, self.processes.device, self.kernel, readers)
        output = model(**forward_arguments(packed))
        if not packed.packing.uses:
            raise RuntimeError("the model's attention was not given the layout of the packed micro-batch")
        names = {"logps": "log_probs", "entropies": "entropy"} if "policy" in readers else {}
        names |= {"values": "state_values"} if "critic" in readers else {}
        given = {name: getattr(output, key) for name, key in names.items()}
        columns = {name: packed.unpack(values) for name, values in given.items() if values is not None}
        return TokenOutputs(**columns), packed.work

    def _padded(self, model: Any, rows: Sequence[Trajectory], completion: int, width: int) -> tuple[TokenOutputs, Work]:
        """TRL's forward: prompts are padded on the left, completions on the right."""
        where = self.processes.device
        ids, mask = left_pad([row.prompt_ids for row in rows], self.pad_token_id, where)
        missing = [completion - len(row.token_ids) for row in rows]
        drawn = [[*row.token_ids, *[self.pad_token_id] * count] for row, count in zip(rows, missing, strict=True)]
        seen = [[1] * (completion - count) + [0] * count for count in missing]
        ids = torch.cat([ids, to_device(torch.tensor(drawn), where)], dim=1)
        mask = torch.cat([mask, to_device(torch.tensor(seen), where)], dim=1)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-completion] = -100
        further: dict[str, Any] = {"output_router_logits": True} if self.aux_loss else {}
        further |= image_arguments([self.image_inputs(row) for row in rows], ids, self.policy.bare.config)
        output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **further)
        columns = (0, width - completion)
        logps = F.pad(output.log_probs[:, -completion:], columns)
        entropies = None if output.entropy is None else F.pad(output.entropy[:, -completion:], columns)
        work = sequences([len(row.prompt_ids) + len(row.token_ids) for row in rows])
        return TokenOutputs(logps, entropies, output.aux_loss if self.aux_loss else None), work


def by_tokens(rows: Sequence[Trajectory], max_tokens: int) -> list[list[int]]:
    """The places of `rows`, those of one prompt together, cut where one more row would make a packed sequence longer
    than `max_tokens`. A row that is longer by itself is alone; there is at least one chunk."""
    pieces = [row_cost(place, rows[place]) for place in by_prompt(rows, range(len(rows)))]
    return cut_by_tokens(pieces, max_tokens) or [[]]


def by_area(rows: Sequence[Trajectory], max_tokens: int) -> Iterator[list[int]]:
    """The places of `rows`, longest first, cut where one more row would make their rectangle, padding included, larger
    than `max_tokens`. A row that is longer by itself is alone; there is at least one chunk."""
    lengths = [(len(row.prompt_ids), len(row.token_ids)) for row in rows]
    chunk: list[int] = []
    prompt = completion = 0
    for place in sorted(range(len(rows)), key=lambda place: -sum(lengths[place])):
        prompt, completion = max(prompt, lengths[place][0]), max(completion, lengths[place][1])
        if chunk and (len(chunk) + 1) * (prompt + completion) > max_tokens:
            yield chunk
            chunk, (prompt, completion) = [], lengths[place]
        chunk.append(place)
    yield chunk


@dataclass(slots=True, kw_only=True)
class Samplers:
    """The policies that have drawn, as the trainer computes them.

    Attributes:
        noise: on the policy's norms, while it samples; None without noise.
    """

    engine: PolicyEngine
    passes: Passes
    processes: Processes
    noise: NoiseInjector | None

    @torch.no_grad()
    def logps(self, batch: Batch, *, noisy: bool = True, adapted: bool = True) -> torch.Tensor:
        """float32 [rows, width]: log-probabilities by the policy that has drawn each row, its base not quantised, with
        or without its noise, with or without its adapter. Every process must come here."""
        drew = [row.weights for row in batch.rows]
        logps = torch.empty((len(drew), batch.width), device=self.processes.device)
        for weights in sorted(set(self.processes.gathered(list(set(drew))))):
            places = [place for place, each in enumerate(drew) if each == weights]
            rows = [batch.rows[place] for place in places or [0]]  # every process makes each pass
            without = nullcontext() if adapted else self.passes.policy.without_adapter()
            with self.policy(weights, noisy) as policy, without:
                made = self.passes.logps(policy, rows, batch.width)
            logps[places] = made[: len(places)]
        return logps

    @contextlib.contextmanager
    def policy(self, weights: Weights, noisy: bool = True) -> Iterator[Any]:
        """The policy that draws with these weights, its adapter unmerged: without dropout, with its noise."""
        with self.passes.policy.gathered() as policy, evaluation_mode(policy), self.engine.published(weights):
            if self.noise is None or not noisy:
                yield policy
                return
            with self.noise.applied(weights.sigma, (weights.version, weights.draw)):
                yield policy


@dataclass(slots=True, kw_only=True)
class SamplerCheck:
    """
    Attributes:
        batches_ahead: batches between, at most, the weights that draw and those that are trained.
        itemsize: bytes of a number that the trainer computes in.
        exact: the loss is corrected by the trainer's own log-probabilities of the policy that drew.
        quantised: the engine draws with a quantised base, and the trainer's own is another one.
        noise_of_all: what noise does to the policy is measured on all rows of a quantised engine, as sigma follows it.
        sends_adapter: workers draw with an adapter that they were sent, and do not merge it at any price.
        tolerance: of the difference between sampler and trainer, in nats; None before they were compared.
        rounding: root mean square of what the adapter does not explain of that difference, in the last comparison; of
            a larger one before what is left, a tenth less for each comparison since.
    """

    samplers: Samplers
    metrics: Metrics
    clock: StepClock
    sampling: Sampling
    batches_ahead: int
    itemsize: int
    exact: bool = False
    quantised: bool = False
    noise_of_all: bool = False
    sends_adapter: bool = False
    tolerance: float | None = None
    rounding: float = 0.0

    @classmethod
    def of(cls, config: Config, **parts: Any) -> SamplerCheck:
        """As `config` asks.

        Args:
            parts: the fields without a default, but batches_ahead.
        """
        rollout, noise, threshold = config.rollout, config.noise_injection, config.training.off_policy_mask_threshold
        quantised, corrected = rollout.quantization != "none", correction_of(rollout) != "none"
        return cls(
            **parts,
            batches_ahead=batches_ahead(rollout),
            exact=rollout.behaviour == "exact" and (corrected or threshold is not None),
            quantised=quantised,
            noise_of_all=noise.enabled and quantised and noise.schedule == "target_kl",
            sends_adapter=rollout.workers > 0
            and config.peft.type != "none"
            and not quantised
            and rollout.merge_adapter is not True,
        )

    @torch.no_grad()
    def compare(self, batch: Batch) -> None:
        """Are the sampler's log-probabilities those of the weights that it should have had? Asked of a few rows before
        the first optimizer step, as afterwards the loss compares them at no cost; where copies draw, or a quantised
        base, of each batch. With `exact` of all rows, which have the trainer's own log-probabilities from then on."""
        engine, processes = self.samplers.engine, self.samplers.processes
        if self.tolerance is not None and not (engine.remote or self.exact or self.quantised):
            return
        if batch.sampler is None and not batch.tokens:
            return  # nothing was drawn that is trained on
        why = engine.not_comparable(self.sampling)
        if why or batch.sampler is None:
            why = why or "not given"
            if self.tolerance is None:
                log.info("rollouts: sampler and trainer are not compared: the sampler's log-probabilities are %s", why)
            self.tolerance = math.inf
            return
        first = self.tolerance is None
        spread = max(1, len(batch.rows) // COMPARED_ROWS)
        if engine.remote and engine.piece_size:
            spread = min(spread, engine.piece_size)  # of each piece, as another copy may have drawn it
        some = list(range(0, len(batch.rows), spread))
        few = batch.select(some)
        compared = batch if self.exact or self.noise_of_all else few
        with self.clock("rollout"):
            trainer = self.samplers.logps(compared)
        assert compared.sampler is not None
        drawn = torch.tensor(
            [[*row.sampled, *[False] * (batch.width - len(row.sampled))] for row in compared.rows],
            device=processes.device,
        )
        apart, known = difference(compared.sampler, trainer, drawn)
        lost = drawn & compared.sampler.isnan() & ~trainer.isnan()
        total, count, lost = processes.added_up([apart.abs().sum().item(), float(known.sum()), float(lost.sum())])
        apart_by = total / count if count else None
        self.tolerance = TOLERANCE[min(engine.itemsize, self.itemsize)]
        require_numbers(int(lost), workers=engine.remote)
        require_same_policy(apart_by, self.tolerance, workers=engine.remote, quantised=self.quantised)
        if count and first:
            log.info("rollouts: sampler and trainer agree: %.2g nats apart", total / count)
        if count and engine.remote:
            self.metrics.value("rollout/engine_mismatch", total / count)
        trainer_of_few, drawn_of_few = (trainer, drawn) if compared is few else (trainer[some], drawn[some])
        with self.clock("rollout"):
            if self.sends_adapter:
                self._require_adapter(few, trainer_of_few, drawn_of_few, apart_by or 0.0)
            if self.quantised and self.noise_of_all:
                self._measure_drift(batch, trainer, drawn)
            elif self.quantised:  # no pass over all rows for the log alone
                self._measure_drift(few, trainer_of_few, drawn_of_few)
        if self.exact:
            batch.sampler = trainer.masked_fill(~known, math.nan)

    def _require_adapter(self, few: Batch, trainer: torch.Tensor, drawn: torch.Tensor, apart_by: float) -> None:
        """Raise a RunError where a worker draws as without the adapter that it was sent, or as with two of it: see
        SHARE. Of a row by itself too, as another worker may have drawn it. Every process must come here.

        Args:
            trainer: float32 [rows, width], log-probabilities by the policy that was sent.
            drawn: bool [rows, width], tokens that the engine drew.
            apart_by: nats a token between both, of all rows.
        """
        assert few.sampler is not None
        without = self.samplers.logps(few, adapted=False)
        apart, known = difference(trainer, few.sampler, drawn)
        effect, _ = difference(trainer, without, known)
        heaviest = (apart * effect).abs().argmax(dim=1, keepdim=True)  # one token that the trainer rounds much
        apart, effect, known = (each.scatter(1, heaviest, 0) for each in (apart, effect, known))
        parts = (apart * effect, effect.square(), effect.abs(), known.float(), apart.square())
        sums = torch.stack([part.sum(dim=1) for part in parts]).double().cpu()
        sums[4] -= torch.nan_to_num(sums[0].square() / sums[1])  # what a row's own share leaves
        whole = sums.new_tensor(self.samplers.processes.added_up(sums.sum(dim=1).tolist()))
        along, effects, moved, tokens, unexplained = torch.cat([sums, whole[:, None]], dim=1)
        share = along / effects  # of least squares; NaN where the adapter does nothing, and then nothing is wrong
        rounding = math.sqrt(max(0.0, unexplained[-1].item()) / max(1.0, tokens[-1].item()))
        before = self.rounding or rounding
        wrong = (moved >= EFFECT * tokens) & (effects >= (ABOVE * before) ** 2 * tokens)
        wrong &= (share.abs() >= SHARE) & (share.abs() * effects.sqrt() >= BEYOND * before)
        percent = torch.nan_to_num(100 * share * wrong).round().int()
        missing, doubled = self.samplers.processes.largest([int(percent.max()), -int(percent.min())])
        if missing or doubled:
            off = missing >= doubled
            to, why = ("without", "off") if off else ("of twice", "merged twice")
            raise RunError(
                "rollout: a worker holds the policy that it was sent, and does not draw with it: its log-probabilities"
                f" are {apart_by:.2g} nats from the trainer's, {max(missing, doubled)}% of the way to those {to} the"
                f" adapter, which is {why}, or a cache is the base's; --config.rollout.workers 0 draws in the"
                " trainer"
            )
        self.rounding = max(rounding, 0.9 * self.rounding)

    def _measure_drift(self, few: Batch, sampled: torch.Tensor, drawn: torch.Tensor) -> None:
        """What lies between the policy that drew and the one that is trained, part by part: each is the KL divergence
        to the next policy, in nats a token ("k3", as rollout/logp_kl), estimated on the tokens that the first one drew.

        Args:
            sampled: as `Samplers.logps` has it.
            drawn: bool [rows, width], tokens that the engine drew.
        """
        assert few.sampler is not None
        self.metrics.kl("rollout/quantization_kl", few.sampler, sampled, drawn)
        clean = sampled
        noisy = max((row.weights.sigma for row in few.rows), default=0.0) > 0.0
        if self.samplers.processes.largest([int(noisy)])[0]:
            clean = self.samplers.logps(few, noisy=False)
            if all(row.weights.sigma for row in few.rows):
                self.metrics.kl("aqn/kl", sampled, clean, drawn)
        if self.batches_ahead:
            model = self.samplers.passes.policy.wrapped
            with evaluation_mode(model):  # without dropout, as the others
                now = self.samplers.passes.logps(model, few.rows, few.width)
            self.metrics.kl("rollout/staleness_kl", clean, now, drawn)


def require_numbers(lost: int, workers: bool) -> None:
    """Raise a RunError where a sampler that gives log-probabilities has NaN for `lost` tokens, where the trainer has
    numbers: its device, or what it computes with, is broken."""
    if lost:
        raise RunError(
            f"rollout: {'a worker' if workers else 'the sampler'} computes no numbers: {lost} log-probabilities are NaN"
            " where the trainer's are not; look at its device and its log, --config.rollout.workers 0 and"
            " --config.rollout.engine fast draw with the trainer's own model"
        )


def require_same_policy(apart: float | None, allowed: float, workers: bool = False, quantised: bool = False) -> None:
    """Raise a RunError where completions do not come from the policy that is trained, their log-probabilities being
    more than `allowed` nats apart: a sampler that runs the base model, or the weights of another run, learns nothing
    and looks healthy. `workers` have drawn them, which hold what they were sent (perl.training.pool.require_sent)."""
    if apart is None or apart <= allowed:
        return
    by = f"its log-probabilities are {apart:.2g} nats from the trainer's on average, where {allowed:.2g} is rounding"
    if quantised:
        raise RunError(
            f"rollout: the sampler's quantised base is too far from the trainer's, or it does not draw with the policy"
            f" that is trained: {by}; --config.rollout.quantization int8 is nearer, none draws with the base as it is"
        )
    if workers:
        raise RunError(
            f"rollout: a worker holds the policy that it was sent, and does not draw with it: {by}; its adapter is off"
            " or merged twice, or its cache is another policy's; --config.rollout.workers 0 draws in the trainer"
        )
    raise RunError(
        f"rollout: the sampler does not run the policy that is trained: {by}; --config.rollout.engine generate samples"
        " with the trainer's own model, --config.rollout.merge_adapter false with the adapter unmerged"
    )


def require_comparable(engine: PolicyEngine, sampling: Sampling, config: Config) -> None:
    """A UserError for what needs log-probabilities that the engine can't give."""
    if (why := engine.not_comparable(sampling)) is None:
        return
    if config.noise_injection.enabled and config.noise_injection.schedule == "target_kl":
        raise UserError(
            f"--config.noise_injection.schedule target_kl: the KL divergence can't be measured, the sampler's"
            f" log-probabilities are {why}; write --config.noise_injection.schedule linear"
        )
    if config.rollout.behaviour == "exact":
        raise UserError(
            f"--config.rollout.behaviour exact: the sampler's log-probabilities are {why}, the trainer's are not;"
            " write --config.rollout.behaviour engine"
        )
