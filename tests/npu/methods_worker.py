"""One rank that trains every PEFT method, one after the other: python -m tests.npu.methods_worker OUT [SETTINGS].

Two steps each, with AQN, gradient checkpointing and a reference policy. Writes OUT/rank<N>.json: of each method what
has moved, a sum of what is trained, and its checkpoint's and result's logits; or the line with which it is refused.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from peft import PeftModel
from transformers import AutoModelForCausalLM

from perl.adapters import ADAPTERS
from perl.adapters.checks import check_method, strategy_of
from perl.adapters.start import whole_weights
from perl.base.errors import UserError
from perl.config.peft_fields import reads_of
from perl.config.schema import NoiseConfig, PeftConfig
from perl.config.training import TrainingConfig
from perl.device.sharding import whole
from tests.trainers import SETTINGS, make_trainer, reward_tokens

OWN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "oft_block_size": 8, "adalora_target_r": 2}
TOKENS = torch.arange(6, 22).reshape(1, 16)


def check(peft: PeftConfig, training: TrainingConfig) -> None:
    """The arguments go with this call: while they are alive under ZeRO-3, transformers splits what it loads."""
    check_method(peft, training, strategy_of(training))


def report_of(name: str, out: Path, settings: dict) -> dict:
    peft = PeftConfig(type=name, **{key: value for key, value in OWN.items() if key in reads_of(name)})
    fixed = {"max_steps": 2, "gradient_accumulation_steps": 1, "max_completion_length": 4, "logging_steps": 2}
    fixed |= {"beta": 0.01, "max_grad_norm": 0.05}  # a reference policy, and gradients that are clipped
    settings = {"gradient_checkpointing": True, "engine": "fast"} | fixed | settings
    try:
        arguments = {key: value for key, value in (SETTINGS | settings).items() if key != "engine"}
        check(peft, TrainingConfig(output_dir=str(out / name), **arguments))
    except UserError as error:
        return {"refused": str(error)}
    noise = NoiseConfig(enabled=True, seed=3, sigma_start=0.05, sigma_end=0.01, num_stages=2)
    model = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32).train()
    trainer = make_trainer(
        out / name,
        model=model,
        adapter=name,
        peft=peft,
        noise=noise,
        rewards=(reward_tokens,),
        **settings,
    )
    before = {key: p.detach().float().cpu().clone() for key, p in trainer.model.named_parameters()}
    trainer.train()
    trainer.save_model(str(out / name / "adapter"))
    with trainer.policy.gathered() as policy:
        weights = {key: whole(p).float().cpu().clone() for key, p in policy.named_parameters()}
        trained = {key for key, p in policy.named_parameters() if p.requires_grad}
    found = {
        "sums": {key: weights[key].double().sum().item() for key in sorted(trained)},
        "frozen": {key: weight.double().sum().item() for key, weight in weights.items() if key not in trained},
        "device": str(trainer.args.device),
        "merged": trainer.step.engine.merge._logged,
        "ranks": trainer.ranks and trainer.ranks.ranks,
        "still": name in ("pissa", "milora") and all(_second_halves_equal(before, weights)),
        "zeros": sum(int((weights[key] == 0).sum()) for key in trained if "lora_E" in key),
    }
    if trainer.args.process_index == 0 and name != "none":
        with whole_weights(), torch.no_grad():
            base = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
            loaded = PeftModel.from_pretrained(base, str(out / name / "adapter"))
            shown = loaded.eval()(input_ids=TOKENS).logits
            with loaded.disable_adapter():
                found["effect"] = (shown - loaded(input_ids=TOKENS).logits).abs().max().item()
    return found


def _second_halves_equal(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Iterator[bool]:
    """Of A its last rows, of B its last columns, of 2 times 4."""
    for key, weight in after.items():
        if "lora_A" in key:
            yield torch.equal(weight[4:], before[key][4:]) and not torch.equal(weight[:4], before[key][:4])
        elif "lora_B" in key:
            yield torch.equal(weight[:, 4:], before[key][:, 4:])


def main() -> None:
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    methods = settings.pop("methods", None) or list(ADAPTERS)
    found = {}
    for name in methods:
        found[name] = report_of(name, out, settings)
        AcceleratorState._reset_state(reset_partial_state=False)
    rank = dist.get_rank() if dist.is_initialized() else 0
    (out / f"rank{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
