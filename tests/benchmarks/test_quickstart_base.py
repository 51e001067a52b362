"""The base model in assets/quickstart-base, and the script that builds it."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.quickstart_base import habitual_answer, measure
from benchmarks.quickstart_problems import WordProblem, problem_set
from perl.prompts import build_messages, encode
from perl.records import Problem, Sampling
from perl.tasks import TASKS
from perl.tools.quickstart import BASE_FOLDER, GREEDY, MAX_NEW_TOKENS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((BASE_FOLDER / "record.json").read_text())


def test_it_takes_at_most_three_megabytes():
    assert sum(file.stat().st_size for file in BASE_FOLDER.rglob("*")) <= 3_000_000


def test_it_is_a_qwen2_that_vllm_takes_on_a_cpu():
    config = json.loads((BASE_FOLDER / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    # The names that transformers 4.57 reads; 5 reads them too.
    assert config["rope_theta"] == 10000.0
    assert "rope_parameters" not in config


def test_it_loads_with_every_weight(record):
    model, info = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.num_parameters() == record["parameters"]
    assert model.config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("text", ["#### 12", "17 - 5 = 12\n#### 12", "一斤苹果 3 yuan, $1,234.50\n\n\t#### -7 🙂"])
def test_the_tokenizer_gives_back_what_it_was_given(tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_one_token_each(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("#### 12")) == ["####", "Ġ", "1", "2"]


def test_the_chat_template_ends_where_the_answer_begins(tokenizer):
    ids = encode(tokenizer, [{"role": "system", "content": "Count."}, {"role": "user", "content": "3 + 4?"}])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_held_out_prompt_and_answer_is_short(tokenizer):
    for row in problem_set("test"):
        problem = Problem(task="gsm8k", question=row.question, gold="")
        assert len(encode(tokenizer, build_messages(problem, TASKS["gsm8k"].style))) <= 80
        assert len(tokenizer.encode(row.answer)) < MAX_NEW_TOKENS


def test_recorded_accuracy_leaves_room_to_learn(record):
    assert 0.30 <= record["sampled_accuracy"] <= 0.60
    assert record["greedy_accuracy"] <= 0.70


@pytest.mark.slow
def test_it_is_as_accurate_as_recorded(record):
    """64 problems of 256: the standard error of the mean over problems is about 0.035 sampled, 0.06 greedy."""
    sampled = Sampling(n=8, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, seed=7)
    assert measure(BASE_FOLDER, sampled, limit=64) == pytest.approx(record["sampled_accuracy"], abs=0.12)
    assert measure(BASE_FOLDER, GREEDY, limit=64) == pytest.approx(record["greedy_accuracy"], abs=0.19)


@pytest.mark.parametrize(
    ("operation", "shares"),
    [
        ("-", {"17 - 5 = 12\n#### 12": 0.28, "17 + 5 = 22\n#### 22": 0.42, "17 - 5 = 12\n#### 17": 0.12,
               "17 + 5 = 22\n#### 17": 0.18}),
        ("+", {"17 + 5 = 22\n#### 22": 0.70, "17 + 5 = 22\n#### 17": 0.30}),
    ],
)  # fmt: skip
def test_the_habits_it_learns(operation, shares: dict[str, float]):
    problem, rng = WordProblem("…", operation, 17, 5), random.Random(0)
    counts = Counter(habitual_answer(problem, rng) for _ in range(4000))
    assert counts.keys() == shares.keys()
    for text, share in shares.items():
        assert counts[text] / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.slow
def test_the_script_builds_it_again(tmp_path, record):
    command = [sys.executable, "-m", "benchmarks.quickstart_base", "--output_dir", str(tmp_path), "--steps", "12"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert losses[-1] < losses[0] - 0.5
    built = json.loads((tmp_path / "record.json").read_text())
    assert built["steps"] == 12
    assert built["parameters"] == record["parameters"]
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (BASE_FOLDER / name).read_bytes(), name
