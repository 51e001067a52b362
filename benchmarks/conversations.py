"""TRL's tool loop beside ours: conversations with a tool that costs nothing, the same tokens forced on both.

    python -m benchmarks.conversations [--pairs 3] [--group_size 8|1] [--turns 4] [--threads 1]

Qwen2.5's chat template; a prompt of --prompt_length tokens, tools included; of each turn --drawn tokens are drawn, the
last ones a call, and so many observed. "trl" is GRPOTrainer's `_generate`, "ours" the feed of PerlGRPOTrainer's engine
(fast), each with all that a rollout costs in training; every side is a process of its own, and its first round is not
counted. The last line is JSON: "ratio" is the median over pairs of TRL's seconds over ours.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LogitsProcessor, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from benchmarks._side import Side, ratio, serve, take_turns
from benchmarks._workload import PEFT, VOCABULARY, Policy, clock, force_lengths, make_model, plain, wake_adapter
from perl import device
from perl.adapters import ADAPTERS
from perl.config.schema import EnvironmentConfig, RolloutConfig
from perl.config.training import TrainingConfig
from perl.environments.conversation import Conversations
from perl.environments.template import ConversationTemplate
from perl.environments.tools import EnvironmentSource, ToolUse
from perl.records import Weights
from perl.training.trainer import PerlGRPOTrainer

SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>", "<|endoftext|>"]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "so"}}\n</tool_call>'
FIRST_OWN = len(SPECIAL) + 10
"""Tokens from here on are the conversations' own first words."""
WORD = " so"
"""A word of one token."""


def search(query: str) -> str:
    """Search.

    Args:
        query: What for.
    """
    return search.answer  # type: ignore[attr-defined]


def make_tokenizer() -> Any:
    """Byte-level BPE, its merges learned from the template, the tool and the call, so that these are few tokens."""
    template = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [template, json.dumps(get_json_schema(search)), CALL, WORD * 8, "user\nassistant\n"]
    made.train_from_iterator(texts * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def filled(render: Callable[[str], list[int]], length: int) -> str:
    """Words of which `render` makes so many tokens."""
    words = WORD * max(1, length - len(render(WORD)) + 1)
    assert len(render(words)) == length, f"{len(render(words))} tokens, not {length}: ask for more"
    return words


class ForcedTurns(LogitsProcessor):
    """Has every turn be --drawn tokens: words and a call, of the last turn words alone. The first word of each
    conversation is its own, so that no two are alike."""

    def __init__(self, tokenizer: Any, turns: int, drawn: int):
        call = tokenizer(CALL)["input_ids"]
        word, end = tokenizer(WORD)["input_ids"][0], tokenizer.eos_token_id
        called = [word] * (drawn - 1 - len(call)) + call + [end]
        self.script = torch.tensor([called] * (turns - 1) + [[word] * (drawn - 1) + [end]])
        self.begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self.header = len(tokenizer("<|im_start|>assistant\n")["input_ids"])
        self.before = 3
        """<|im_start|> in the prompt."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        begins = input_ids == self.begin
        last = input_ids.shape[1] - 1 - begins.int().flip(1).argmax(dim=1)
        place = input_ids.shape[1] - last - self.header
        turn = (begins.sum(dim=1) - self.before) // 2
        forced = self.script[turn.clamp(max=len(self.script) - 1), place.clamp(0, self.script.shape[1] - 1)]
        forced = torch.where((turn == 0) & (place == 0), FIRST_OWN + torch.arange(len(forced)), forced)
        scores.fill_(float("-inf"))
        return scores.scatter(1, forced[:, None], 0.0)


def a_round(side: str, options: argparse.Namespace, folder: str) -> Callable[[], dict[str, Any]]:
    tokenizer, schemas = make_tokenizer(), [get_json_schema(search)]
    policy = Policy(model=options.model, dtype="float32", merge_adapter="auto", capture_graphs="auto", eos=(1,))

    def asked(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, return_dict=False)

    template = ConversationTemplate(tokenizer, schemas, "tool", "auto")
    search.answer = filled(  # type: ignore[attr-defined]
        lambda text: template.observation([{"role": "tool", "name": "search", "content": text}]), options.drawn
    )
    prompt = [{"role": "user", "content": filled(asked, options.prompt_length)}]
    rows = options.prompts * options.group_size
    longest = options.turns * options.drawn + (options.turns - 1) * options.drawn
    args = TrainingConfig(
        output_dir=folder,
        num_generations=max(2, options.group_size),
        per_device_train_batch_size=max(2, rows),
        max_completion_length=longest,
        use_cpu=device.detect().kind == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        beta=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    common: dict[str, Any] = {
        "model": make_model(policy),
        "reward_funcs": lambda completions, **_: None,
        "train_dataset": Dataset.from_dict({"prompt": [prompt] * max(2, options.prompts)}),
        "processing_class": tokenizer,
    }
    if side == "trl":
        peft_config = ADAPTERS[PEFT.type].build(PEFT)
        trainer: Any = trl.GRPOTrainer(**common, args=args, peft_config=peft_config, tools=[search])
    else:
        source = EnvironmentSource(make=lambda: ToolUse({"search": search}), schemas=schemas)
        settings = EnvironmentConfig(max_turns=options.turns)
        trainer = PerlGRPOTrainer(
            plain(args, rollout=RolloutConfig(engine="fast")),
            **common,
            conversations=Conversations(source=source, template=template, config=settings),
        )
    trainer.state.max_steps = 1000
    wake_adapter(trainer.model)
    trainer.model.train()
    force_lengths(trainer, ForcedTurns(tokenizer, options.turns, options.drawn))  # type: ignore[arg-type]
    every = [(place, sample) for place in range(options.prompts) for sample in range(options.group_size)]

    def ours() -> list[list[int]]:
        collector = trainer.step.collector
        collector.engine.publish(Weights(version=trainer.state.global_step))
        batch = collector._begun(0, every, Weights())
        rows = sorted(batch.complete, key=lambda row: row.sample)
        return [row.token_ids for row in rows]

    def theirs() -> list[list[int]]:
        trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"search": search}] * rows, [{}] * rows
        return trainer._generate([prompt for _ in every])[1]

    def play() -> dict[str, Any]:
        started, cpu = clock(), time.process_time()
        completions = ours() if side == "ours" else theirs()
        seconds, cpu = clock() - started, time.process_time() - cpu
        assert [len(ids) for ids in completions] == [longest] * rows, [len(ids) for ids in completions]
        trainer.state.global_step += 1
        return {"wall_s": seconds, "cpu_s": cpu, "tokens": completions[0]}

    return play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--prompt_length", type=int, default=300)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--drawn", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="28m")
    parser.add_argument("--side", choices=["trl", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        torch.set_num_threads(options.threads)
        with tempfile.TemporaryDirectory() as folder:
            serve(a_round(options.side, options, folder))
        return
    sides = theirs, ours = [Side("benchmarks.conversations", name, options.threads) for name in ("trl", "ours")]
    first = [side.round()["tokens"] for side in sides]  # not counted
    assert first[0] == first[1], "the conversations are not the same"
    for side in sides:
        side.answers.clear()
    take_turns(sides, options.pairs, lambda now: f"trl {now[0]['wall_s']:.2f} s, ours {now[1]['wall_s']:.2f} s")
    for side in sides:
        side.close()
    rows = options.prompts * options.group_size
    result: dict[str, Any] = {"benchmark": "conversations", "vocabulary": VOCABULARY}
    result |= {name: value for name, value in vars(options).items() if name != "side"}
    for side in sides:
        result[f"{side.name}_s"] = side.median("wall_s")
        result[f"{side.name}_per_s"] = round(rows / side.median("wall_s"), 3)
    print(json.dumps(result | {"cpu_ratio": ratio(theirs, ours, "cpu_s"), "ratio": ratio(theirs, ours)}))


if __name__ == "__main__":
    main()
