"""Builds assets/quickstart-base: a Qwen2 of half a million weights that reads word problems, with wrong habits.

    python -m benchmarks.quickstart_base [--output_dir DIR] [--steps N] [--seed N]

It is trained from scratch on the CPU, on text with two wrong habits: most subtractions are answered by adding, and
some last lines repeat a number of the question. So the model knows its sums and often gives a wrong answer all the
same, a fault that reinforcement learning can fix.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.quickstart_problems import NAMES, TEST_SIZE, WordProblem, derivation, endless, problem_set
from perl.base.errors import report_errors
from perl.base.files import write_json
from perl.config.parser import Parser
from perl.config.types import NonNegativeInt, PositiveInt
from perl.prompts import PromptStyle, build_messages, encode
from perl.records import Problem, Sampling
from perl.tasks import TASKS
from perl.tools.fetch import save_tokenizer
from perl.tools.quickstart import BASE_FOLDER, GREEDY, HELD_OUT, SAMPLED

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

ADDS_INSTEAD = 0.6
"""First habit: share of the subtractions that pretraining answers by adding."""
FORGETS_RESULT = 0.3
"""Second habit: share of all problems where its last line repeats the first number instead of the result."""
BARE_SHARE = 0.25
"""Share of the pretraining problems asked without the task's instruction."""
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
VOCABULARY_SIZE = 640  # at most; our words and the 256 bytes need fewer
SIZE_OF_CORPUS = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, TURN_END_ID = 0, 2
CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,  # heads of 32: vLLM's CPU attention takes 32 and 64, not 16
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": TURN_END_ID,
    "pad_token_id": END_OF_TEXT_ID,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TASK = "gsm8k"


def build_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE learnt on our problems: any text round-trips, our words are one token each, digits stand alone."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    # transformers 5 gives a Qwen2 folder this class and its rules for splitting, whatever tokenizer.json says.
    tokenizer = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    problems = islice(endless(seed=0, without=()), SIZE_OF_CORPUS)
    template = TASKS[TASK].style.template
    corpus = [text for p in problems for text in (template.replace("{question}", p.question), p.answer)]
    roles = ["system\nuser\nassistant\n"] * SIZE_OF_CORPUS
    names = [f" {name}" for name in NAMES]
    tokenizer.train_from_iterator([*corpus, *roles, *names], trainer)
    return Qwen2Tokenizer(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def build_model(vocabulary: int) -> Qwen2ForCausalLM:
    """An untrained Qwen2 in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**CONFIG, vocab_size=vocabulary))


def habitual_answer(problem: WordProblem, rng: random.Random) -> str:
    """The text that pretraining teaches for `problem`: right, or wrong by one or both of the habits."""
    adds = problem.operation == "-" and rng.random() < ADDS_INSTEAD
    forgets = rng.random() < FORGETS_RESULT
    return derivation("+" if adds else problem.operation, problem.x, problem.y, problem.x if forgets else None)


def make_batch(
    problems: list[WordProblem], tokenizer: Qwen2Tokenizer, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, int64 of shape (problems, longest); prompt and padding are labelled -100."""
    import torch

    rows = []
    for problem in problems:
        style = PromptStyle() if rng.random() < BARE_SHARE else TASKS[TASK].style
        prompt = encode(tokenizer, build_messages(Problem(task=TASK, question=problem.question, gold=""), style))
        rows.append((prompt, tokenizer.encode(habitual_answer(problem, rng) + TURN_END)))
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.full((len(rows), longest), END_OF_TEXT_ID)
    labels = torch.full((len(rows), longest), -100)
    for i, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids[i, :end] = torch.tensor(prompt + completion)
        labels[i, len(prompt) : end] = torch.tensor(completion)
    return ids, labels


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, steps: int, seed: int) -> None:
    """Next-token training on the completions: AdamW, linear warm-up, cosine to a tenth of the peak."""
    import torch

    rng = random.Random(seed)
    fixed = {problem.question for split in ("train", "test") for problem in problem_set(split)}
    stream = endless(seed, without=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    model.train()
    started = time.perf_counter()
    for step in range(steps):
        progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
        scale = (step + 1) / WARMUP_STEPS if progress < 0 else 0.55 + 0.45 * math.cos(math.pi * progress)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * scale
        ids, labels = make_batch(list(islice(stream, BATCH_SIZE)), tokenizer, rng)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            elapsed = time.perf_counter() - started
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {elapsed:.0f} s", flush=True)
    model.eval()


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write the model's folder by hand: transformers 5 would write configuration and tokenizer in a form that 4.57,
    on which Ascend's vLLM may run, misreads (rope_parameters) or refuses (TokenizersBackend)."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **CONFIG, "vocab_size": len(tokenizer)}
    write_json(folder / "config.json", config | {"rope_theta": 10000.0, "torch_dtype": "float32"})
    write_json(folder / "generation_config.json", {"eos_token_id": TURN_END_ID, "pad_token_id": END_OF_TEXT_ID})
    save_tokenizer(tokenizer, "Qwen2Tokenizer", folder)


def measure(folder: Path, sampling: Sampling, limit: int | None = None) -> float:
    """Accuracy of the model in `folder` on the first `limit` held-out problems, by the evaluator of perl/eval.py."""
    from perl.config.evaluation import EvalConfig
    from perl.evaluation.run import evaluate

    with tempfile.TemporaryDirectory() as results:
        config = EvalConfig(
            model=str(folder),
            dataset=str(HELD_OUT),
            result_dir=results,
            max_samples=limit,
            n=sampling.n,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            seed=sampling.seed,
        )
        return evaluate(config)["test"]["metrics"]["accuracy"]["value"]


def build(folder: Path, steps: int, seed: int) -> dict[str, float | int | str]:
    """Train, write and measure the base model; returns what record.json holds."""
    import torch

    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    train(model, tokenizer, steps, seed)
    save(model, tokenizer, folder)
    record = {
        "seed": seed,
        "steps": steps,
        "batch_size": BATCH_SIZE,
        "parameters": model.num_parameters(),
        "held_out_problems": TEST_SIZE,
        "sampled_accuracy": round(measure(folder, SAMPLED), 4),
        "greedy_accuracy": round(measure(folder, GREEDY), 4),
        "torch": torch.__version__,
    }
    write_json(folder / "record.json", record)
    return record


def main() -> None:
    parser = Parser(prog="python -m benchmarks.quickstart_base", description="Build the quickstart's base model.")
    parser.add_argument("--output_dir", type=Path, default=BASE_FOLDER)
    parser.add_argument("--steps", type=PositiveInt, default=2000)
    parser.add_argument("--seed", type=NonNegativeInt, default=1)
    with report_errors():
        args = parser.parse_args()
        record = build(Path(args.output_dir), int(args.steps), int(args.seed))
        print(json.dumps(record))


if __name__ == "__main__":
    main()
