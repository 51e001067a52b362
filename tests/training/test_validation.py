"""Validation: what it scores is what perl/eval.py scores, and the training is the same with it and without."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from perl.base.errors import Stopped, UserError
from perl.base.files import SAVING
from perl.config.evaluation import EvalConfig
from perl.config.load import parse
from perl.engines.hf import HFEngine
from perl.evaluation.candidates import find_candidates
from perl.evaluation.datasets import load_problem_set
from perl.evaluation.run import evaluate
from perl.evaluation.setup import Setup
from perl.grading import RULES, Grader
from perl.models.folders import content_hash
from perl.prompts import ChatTemplate, build_messages, decode, encode
from perl.records import Problem, Prompt, Sample, Sampling
from perl.runs.callbacks import ProgressLine
from perl.scoring.results import read_samples, same_model
from perl.tasks import TASKS, load_problems
from perl.tasks.trained import problem_hash
from perl.training import validation
from perl.training.grpo import train
from perl.training.preflight import check_run
from perl.training.validation import Validation, best_so_far, logged_steps, metrics_of, share_of
from perl.training.validation_setup import set_up_validation
from tests.engines.models import completions
from tests.folders import metrics
from tests.quantised import needs_int8
from tests.results import record
from tests.tiny import CHAT_TEMPLATE, END, save_tiny, tiny_tokenizer
from tests.training.test_other_engines import in_a_process, on_cpu

ROOT = Path(__file__).parents[2]
STEPS = {
    "training.max_steps": 4,
    "training.per_device_train_batch_size": 4,
    "training.gradient_accumulation_steps": 1,
    "training.steps_per_generation": 2,
    "training.num_generations": 4,
    "training.max_completion_length": 8,
    "training.learning_rate": 0.01,
    "training.logging_steps": 2,
    "training.gradient_checkpointing": "false",
    "training.save_steps": 2,
    "noise_injection.enabled": "true",
    "peft.r": 4,
    "peft.lora_dropout": 0.1,
}
"""Noise, dropout, two updates a rollout and two steps a log: whatever could be moved by a validation between them."""
STYLE = TASKS["gsm8k"].style
VALIDATION = {"validation.every_steps": 1, "validation.max_new_tokens": 24}
CORE = "val-core/openai/gsm8k/acc/mean@"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """model/, eight sums to train on, seven others to validate on (the last a repeat), and a reward. The base model
    "solves" every second of the others: a random one is never right by itself."""
    folder = tmp_path_factory.mktemp("made")
    engine = HFEngine(str(save_tiny(folder / "model", scale=4.0)))

    def answer(question: str) -> str:
        ids = encode(engine.tokenizer, build_messages(Problem(task="gsm8k", question=question, gold=""), STYLE))
        prompt = Prompt(token_ids=tuple(ids), seed=0)
        completion = completions(engine, [prompt], Sampling(temperature=0.0, max_new_tokens=24))[0]
        return RULES["flexible"].extract(decode(engine.tokenizer, completion.content_ids)) or "7"

    def rows(numbers: Any, solved: int = 0) -> str:
        asked = [f"What is {i} + 3 ?" for i in numbers]
        golds = [answer(text) if solved and i % solved == 0 else str(i) for i, text in enumerate(asked)]
        pairs = zip(asked, golds, strict=True)
        return "".join(json.dumps({"question": text, "answer": f"#### {gold}"}) + "\n" for text, gold in pairs)

    (folder / "sums.jsonl").write_text(rows(range(8)))
    (folder / "others.jsonl").write_text(rows([*range(11, 17), 11], solved=2))
    (folder / "digits.py").write_text(
        "def digits(completions, **kwargs):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [sum(x.isdigit() for x in t) / max(len(t), 1) for t in texts]\n"
    )
    return folder


@pytest.fixture(scope="module")
def flags(made):
    """`flags(name=value, …)`: flags of a run in whose names __ is a dot."""
    given = STEPS | {
        "model.model_name_or_path": made / "model",
        "dataset.dataset_name_or_path": made / "sums.jsonl",
        "reward.functions": json.dumps([f"{made / 'digits.py'}:digits"]),
    }

    def make(*more: dict, **changes: Any) -> list[str]:
        both: dict[str, Any] = dict(given)
        for each in more:
            both |= each
        both |= {name.replace("__", "."): value for name, value in changes.items()}
        return [word for name, value in both.items() for word in (f"--config.{name}", str(value))]

    return make


@pytest.fixture(scope="module")
def validated(made, flags, tmp_path_factory) -> Path:
    """A run that was validated greedily before it and after each of its four steps."""
    folder = tmp_path_factory.mktemp("validated") / "run"
    datasets = {"validation.datasets": json.dumps([str(made / "others.jsonl")]), "validation.save_best": "true"}
    return train(flags(VALIDATION, datasets, training__output_dir=folder, training__report_to="tensorboard"))


def validations(run: Path, n: int = 1) -> dict[int, float]:
    found = [(row["step"], row[f"{CORE}{n}"]) for row in metrics(run) if f"{CORE}{n}" in row]
    assert len(dict(found)) == len(found), "a step was validated twice"
    return dict(found)


def without_time(records: dict) -> dict:
    return {row: {k: v for k, v in record.items() if k != "time"} for row, record in records.items()}


def samples(run: Path, step: int, name: str = "others") -> dict:
    return without_time(read_samples(run / "validation" / f"step-{step}" / name / "samples.jsonl"))


def evaluated(made: Path, adapter: Path | None, folder: Path, **settings: Any) -> dict:
    settings = {"max_new_tokens": 24} | settings
    words = [str(adapter)] if adapter else None
    evaluate(EvalConfig(str(made / "model"), str(made / "others.jsonl"), str(folder), words, **settings))
    return without_time(read_samples(folder / "others" / "samples.jsonl"))


def test_it_equals_the_evaluator_row_by_row(made, validated, tmp_path):
    assert list(validations(validated)) == [0, 1, 2, 3, 4]
    theirs = evaluated(made, validated / "checkpoint-4", tmp_path / "after")
    assert samples(validated, 4) == theirs
    assert len(theirs) == 7
    assert validations(validated)[0] > 0
    assert samples(validated, 0) != theirs  # or the adapter would change nothing
    summary = json.loads((tmp_path / "after" / "others" / "summary.json").read_text())
    ours = json.loads((validated / "validation" / "step-4" / "others" / "summary.json").read_text())
    same = set(summary) - {"adapter", "adapter_hash", "generation", "merge", "max_model_len", "provenance"}
    assert {name: ours[name] for name in same - {"trained_on"}} == {
        name: summary[name] for name in same - {"trained_on"}
    }
    assert ours["generation"]["dtype"] == summary["generation"]["dtype"] == "float32"
    assert ours["metrics"]["accuracy"]["value"] == validations(validated)[4]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_it_equals_the_evaluator_where_completions_are_sampled(made, flags, tmp_path, engine):
    """The seeds are the evaluator's too; what transformers' own `generate` draws by them is the same."""
    sampled = {"validation.n": 4, "validation.temperature": 0.7, "validation.datasets": f'["{made / "others.jsonl"}"]'}
    run = train(flags(VALIDATION, sampled, training__output_dir=tmp_path / "run", rollout__engine=engine))
    theirs = evaluated(made, run / "checkpoint-4", tmp_path / "after", n=4, temperature=0.7)
    assert samples(run, 4) == theirs
    scored = json.loads((tmp_path / "after" / "others" / "summary.json").read_text())["metrics"]
    (row,) = [row for row in metrics(run) if row["step"] == 4 and f"{CORE}4" in row]
    assert row[f"{CORE}4"] == scored["avg@4"]["value"]
    assert row["val-core/openai/gsm8k/acc/pass@4"] == scored["pass@4"]["value"]
    assert row["val-aux/openai/gsm8k/acc/pass@2"] == scored["pass@2"]["value"]
    assert row["val-core/openai/gsm8k/acc/maj@4"] == scored["maj@4"]["value"]


@pytest.mark.parametrize(
    "engine",
    [
        "fast",
        pytest.param("generate", marks=pytest.mark.slow),
        pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm]),
    ],
)
def test_it_draws_from_the_distribution_that_is_asked_for(made, flags, tmp_path, engine):
    """600 samples of one token of one problem: how often each text came is what transformers' own filters leave of the
    model's distribution."""
    by = {"n": 600, "temperature": 1.5, "top_p": 0.7, "top_k": 4, "max_new_tokens": 1, "max_samples": 1}
    by |= {"datasets": f'["{made / "others.jsonl"}"]', "after_train": "false"}
    run = {"rollout.engine": engine, "noise_injection.enabled": "false", "training.vllm_max_model_length": 96}
    run |= {"training.max_steps": 1, "training.save_strategy": "no", "training.output_dir": tmp_path / "run"}
    argv = flags(run, {f"validation.{name}": value for name, value in by.items()})
    _ = in_a_process(in_a_child, argv) if engine == "vllm" else train(argv)
    records = list(samples(tmp_path / "run", 0).values())
    tokenizer = tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(records[0]["prompt"]).input_ids])
    with torch.no_grad():
        scores = model(ids).logits[:, -1] / 1.5
    for warp in (TopKLogitsWarper(4), TopPLogitsWarper(0.7)):
        scores = warp(ids, scores)
    expected: Counter[str] = Counter()
    for token, share in enumerate(scores.softmax(dim=-1)[0].tolist()):
        expected[decode(tokenizer, [token] if token != END else [])] += share
    likely = {text: share for text, share in expected.items() if share > 0}
    drawn = Counter(record["completion"] for record in records)
    assert 1 < len(likely) < 4  # both filters cut
    assert set(drawn) == set(likely)
    assert drawn.total() == 600
    for text, share in likely.items():
        assert drawn[text] / 600 == pytest.approx(share, abs=4 * (share * (1 - share) / 600) ** 0.5)


@pytest.mark.parametrize("engine", ["fast", pytest.param("generate", marks=pytest.mark.slow)])
def test_the_training_is_the_same_without_it(made, flags, validated, tmp_path, engine):
    """Adapter, optimizer, random numbers, rollouts still to be used, and each metric of the steps."""
    run = validated
    if engine != "fast":
        datasets = {"validation.datasets": f'["{made / "others.jsonl"}"]', "validation.n": 2}
        datasets |= {"validation.temperature": 1.0, "rollout.engine": engine}
        run = train(flags(VALIDATION, datasets, training__output_dir=tmp_path / "validated"))
    plain = train(flags(training__output_dir=tmp_path / "plain", rollout__engine=engine))
    assert not (plain / "validation").exists()
    for checkpoint in ("checkpoint-2", "checkpoint-4", "adapter"):
        ours, theirs = (load_file(folder / checkpoint / "adapter_model.safetensors") for folder in (run, plain))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("rng_state.pth", "optimizer.pt", "process_state_0.pt"):
        ours, theirs = (torch.load(folder / "checkpoint-2" / name, weights_only=False) for folder in (run, plain))
        assert str(ours) == str(theirs)
    clocks = ("time", "timing/", "perf/", "step_time", "train_")
    ours, theirs = (
        [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in metrics(folder) if "reward" in row]
        for folder in (run, plain)
    )
    assert ours == theirs
    assert len(ours) == 2


@needs_int8
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_policy_above_the_quantised_base_is_scored_besides(made, flags, validated, tmp_path, caplog, workers):
    """Before the first step, where the adapter changes nothing, its rows are those of perl/eval.py --quantization; the
    policy as it is is scored as without, and the training is the same."""
    datasets = {"validation.datasets": json.dumps([str(made / "others.jsonl")]), "validation.save_best": "true"}
    quantised = {"rollout.quantization": "int8_w8a8", "rollout.workers": workers, "rollout.piece_size": 4}
    both = quantised | {"validation.quantized": "true"}
    run = train(flags(VALIDATION, datasets, both, training__output_dir=tmp_path / "run"))
    assert "validation: scores are of the policy as it is trained, and of that above the int8_w8a8 base" in caplog.text
    theirs = evaluated(made, None, tmp_path / "int8", quantization="int8_w8a8")
    floats, above = ([samples(run, step, name) for step in range(5)] for name in ("others", "quantized/others"))
    assert above[0] == theirs
    assert floats[0] == samples(validated, 0) != theirs
    assert floats[4] == evaluated(made, run / "checkpoint-4", tmp_path / "merged")
    assert above[4] not in (floats[4], above[0])
    logged = {row["step"]: row for row in metrics(run) if f"{CORE}1" in row}
    for step, rows in enumerate(above):
        expected = sum(row["score"] for row in rows.values()) / 7  # the last problem repeats the first
        assert logged[step]["val-core/openai/gsm8k/quantized/acc/mean@1"] == pytest.approx(expected)
    last = run / "validation/step-4"
    of_float, of_int8 = (
        json.loads((last / name / "summary.json").read_text()) for name in ("others", "quantized/others")
    )
    assert (of_float["quantization"], of_int8["quantization"]) == (None, "int8_w8a8")
    assert (of_float["adapter_mode"], of_int8["adapter_mode"]) == ("merge", "lora")
    assert json.loads((run / "best" / "best.json").read_text())["metric"] == f"{CORE}1"
    plain = train(flags(quantised, training__output_dir=tmp_path / "plain"))
    ours, theirs = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (run, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_in_the_trainers_process_validates_the_quantised_policy_alone(made, flags, tmp_path):
    """It holds no other, and no metric is named as that of the policy as it is trained."""
    base = save_tiny(tmp_path / "model", scale=4.0, hidden_size=128, intermediate_size=192, num_key_value_heads=1)
    engine = {"rollout.engine": "vllm", "noise_injection.enabled": "false", "training.vllm_max_model_length": 96}
    engine |= {"rollout.quantization": "int8_w8a8", "validation.quantized": "true", "model.model_name_or_path": base}
    datasets = {"validation.datasets": json.dumps([str(made / "others.jsonl")]), "validation.save_best": "true"}
    run = tmp_path / "run"
    in_a_process(in_a_child, flags(VALIDATION, engine, datasets, training__output_dir=run))
    validated = [row for row in metrics(run) if any(name.startswith("val-core/") for name in row)]
    assert len(validated) == 5
    assert all("/quantized/acc/" in name for row in validated for name in row if name.startswith("val-core/"))
    assert not (run / "validation" / "step-4" / "others").exists()
    best = json.loads((run / "best" / "best.json").read_text())
    assert best["metric"] == "val-core/openai/gsm8k/quantized/acc/mean@1"
    summary = json.loads((run / "validation" / "step-4" / "quantized" / "others" / "summary.json").read_text())
    assert (summary["quantization"], summary["engines"]) == ("int8_w8a8", ["vllm"])
    assert samples(run, 4, "quantized/others") != samples(run, 0, "quantized/others")


def in_a_child(argv: list[str]) -> None:
    on_cpu()
    train(argv)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_in_the_trainers_process_validates_and_changes_nothing(made, flags, tmp_path):
    """Real vLLM, each completion with its own seed: two validations of the same weights give the same texts."""
    engine = {"rollout.engine": "vllm", "noise_injection.enabled": "false", "training.vllm_max_model_length": 96}
    datasets = {"validation.datasets": f'["{made / "others.jsonl"}"]', "validation.n": 2}
    datasets |= {"validation.temperature": 1.0, "training.output_dir": tmp_path / "run"}
    in_a_process(in_a_child, flags(engine, VALIDATION, datasets))
    in_a_process(in_a_child, flags(engine, training__output_dir=tmp_path / "plain"))
    ours, theirs = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("run", "plain"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert list(validations(tmp_path / "run", n=2)) == [0, 1, 2, 3, 4]
    base, last = samples(tmp_path / "run", 0), samples(tmp_path / "run", 4)
    assert {record["engine"] for record in base.values()} == {"vllm"}
    assert len({record["completion"] for record in base.values()}) > 7  # the two samples of a problem differ
    assert len({key for key in base if base[key]["completion"] != last[key]["completion"]}) > 0
    assert max(record["tokens"] for record in base.values()) == 24
    repeat = {key: value for key, value in datasets.items() if key != "training.output_dir"}
    again = flags(engine, VALIDATION, repeat, training__output_dir=tmp_path / "again", training__max_steps=1)
    in_a_process(in_a_child, again)
    assert samples(tmp_path / "again", 0) == base


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_samples_a_continued_adapter_with_noise_that_holds_a_kl_and_validates_without_it(
    made, flags, validated, tmp_path
):
    """Real vLLM with all at once: peft.adapter, its frozen reference, target_kl, and validation between rollouts."""
    engine = {"rollout.engine": "vllm", "training.vllm_max_model_length": 96, "training.beta": 0.04}
    engine |= {"training.vllm_importance_sampling_correction": "false", "noise_injection.schedule": "target_kl"}
    engine |= {"peft.adapter": validated / "adapter", "noise_injection.sigma_start": 0.01}
    datasets = {"validation.datasets": json.dumps([str(made / "others.jsonl")])}
    runs = [tmp_path / name for name in ("whole", "again")]
    in_a_process(in_a_child, flags(engine, VALIDATION, datasets, training__output_dir=runs[0]))
    assert list(validations(runs[0])) == [0, 1, 2, 3, 4]
    logged = {row["step"]: row for row in metrics(runs[0]) if "reward" in row}
    assert all(logged[step]["aqn/kl"] > 0 for step in (2, 4))
    assert logged[2]["aqn/sigma"] != 0.01  # set by what the first rollout measured
    shutil.copytree(runs[0], runs[1])
    shutil.rmtree(runs[1] / "checkpoint-4")
    resumed = {"training.output_dir": runs[1], "training.resume_from_checkpoint": "true"}
    in_a_process(in_a_child, flags(engine, VALIDATION, datasets, resumed))
    ours, theirs = (load_file(run / "adapter" / "adapter_model.safetensors") for run in runs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert samples(runs[0], 4) == samples(runs[1], 4)


def test_the_best_adapter_is_kept(validated, made):
    best = json.loads((validated / "best" / "best.json").read_text())
    scores = validations(validated)
    assert scores.pop(0) > max(scores.values())  # the base, which is no adapter to keep
    assert best["metric"] == f"{CORE}1"
    assert best["value"] == max(scores.values())
    assert best["step"] == min(step for step, score in scores.items() if score == best["value"])
    assert not (validated / "best" / "training_args.bin").exists()
    assert not (validated / SAVING).exists()
    (candidate,) = find_candidates([str(validated / "best")])
    assert candidate.step == best["step"]


def test_tensorboard_gets_the_scores(validated):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(validated.rglob("events.out.tfevents.*")).parent))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars(f"train/{CORE}1")}
    assert found == pytest.approx(validations(validated))


@pytest.mark.parametrize("mode", ["continue", "merge"])
def test_a_training_from_an_adapter_says_what_was_scored_before_it(made, flags, validated, tmp_path, mode):
    """The scores before the first step are those of the adapter, and they may be the best."""
    start = {"peft.adapter": validated / "adapter", "peft.adapter_mode": mode, "training.max_steps": 1}
    start |= {"peft.lora_dropout": 0.1, "training.learning_rate": 0.0, "training.save_steps": 1}
    datasets = {"validation.datasets": json.dumps([str(made / "others.jsonl")]), "validation.save_best": "true"}
    run = train(flags(VALIDATION, datasets, start, training__output_dir=tmp_path / "run"))
    assert samples(run, 0).keys() == samples(validated, 4).keys()
    if mode == "continue":
        assert samples(run, 0) == samples(validated, 4)
    summary = json.loads((run / "validation" / "step-0" / "others" / "summary.json").read_text())
    base, adapter = (made / "model", str(validated / "adapter")) if mode == "continue" else (run / "base", None)
    assert (summary["model"], summary["adapter"]) == (str(base), adapter)
    assert summary["base_hash"] == content_hash(base)
    assert json.loads((run / "best" / "best.json").read_text())["step"] == (0 if mode == "continue" else 1)


def test_two_validations_are_of_two_models(validated):
    folders = [validated / "validation" / f"step-{step}" for step in (0, 2, 4)]
    before, middle, after = (json.loads((f / "others" / "summary.json").read_text()) for f in folders)
    assert not same_model(middle, after)
    assert not same_model(before, after)
    assert same_model(after, after)


def test_a_resumed_run_repeats_no_validation_and_loses_none(made, flags, validated, tmp_path, monkeypatch):
    """As if the run had been killed in the validation of step 2, whose checkpoint stood, and had been best before."""
    run = tmp_path / "run"
    shutil.copytree(validated, run)
    rows = [row for row in metrics(run) if row["step"] < 2 or (row["step"] == 2 and "reward" in row)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = validations(run)
    assert list(before) == [0, 1]
    shutil.rmtree(run / "checkpoint-4")
    best = {"step": 1, "metric": f"{CORE}1", "value": 1.0, "metrics": {}}
    (run / "best" / "best.json").write_text(json.dumps(best))
    datasets = {"validation.datasets": json.dumps([str(made / "others.jsonl")]), "validation.save_best": "true"}
    train(flags(VALIDATION, datasets, training__output_dir=run, training__resume_from_checkpoint="true"))
    assert validations(run) == validations(validated)
    assert json.loads((run / "best" / "best.json").read_text()) == best  # no later one was better


def test_a_run_that_goes_on_elsewhere_takes_its_best_along(made, flags, validated, tmp_path):
    """The better one of a later step stays behind."""
    run = tmp_path / "run"
    shutil.copytree(validated, run)
    (run / "best").rename(run / "_best_before")
    for name, step in (("_best_before", 1), ("best", 3)):
        (run / name).mkdir(exist_ok=True)
        best = {"step": step, "metric": f"{CORE}1", "value": 1.0, "metrics": {}}
        (run / name / "best.json").write_text(json.dumps(best))
    datasets = {"validation.datasets": json.dumps([str(made / "others.jsonl")]), "validation.save_best": "true"}
    there = {"training__output_dir": tmp_path / "there", "training__resume_from_checkpoint": run / "checkpoint-2"}
    train(flags(VALIDATION, datasets, **there))
    assert json.loads((tmp_path / "there" / "best" / "best.json").read_text())["step"] == 1
    weights = [folder / "adapter_model.safetensors" for folder in (run / "_best_before", tmp_path / "there" / "best")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not (tmp_path / "there" / "_saving").exists()


def test_steps_that_are_trained_again_are_validated_again(validated, made, flags):
    """A run that goes on from an earlier checkpoint, with other flags perhaps, is another one from there."""
    setup = set_up_validation(
        parse(flags(validation__datasets=f'["{made / "others.jsonl"}"]')).build(), ChatTemplate(tiny_tokenizer()), ()
    )
    assert setup is not None
    with Grader() as grader:
        again = Validation(setup, grader, validated, 0, 1)
    assert again.done == {0, 1, 2, 3, 4}
    nothing: Any = None
    state: Any = SimpleNamespace(global_step=2)
    again.on_train_begin(nothing, state, nothing)
    assert again.done == {0, 1, 2}
    assert again.due(4, 4)
    assert not again.due(0, 4)


def test_a_signal_in_a_validation_ends_the_run_with_the_step_before_it(made, flags, tmp_path, monkeypatch):
    validate = Validation.run

    def interrupted(self, step, *rest):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(self, step, *rest)

    monkeypatch.setattr(Validation, "run", interrupted)
    datasets = {"validation.datasets": f'["{made / "others.jsonl"}"]', "training.output_dir": tmp_path / "run"}
    with pytest.raises(Stopped, match="SIGTERM after step 1 of 4, checkpoint-1 is saved"):
        train(flags(VALIDATION, datasets))
    assert list(validations(tmp_path / "run")) == [0, 1]
    monkeypatch.undo()
    train(flags(VALIDATION, datasets, training__resume_from_checkpoint="true"))
    assert list(validations(tmp_path / "run")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"datasets": '["no_such_task"]'}, r"^--config.validation.datasets: unknown data set 'no_such_task'"),
        ({"datasets": "gsm8k,math500"}, r"--config.validation.datasets: expected a list.*write '\[\"gsm8k\", "),
        ({"n": 4, "temperature": 0}, r"--config.validation.n 4 with temperature 0: .* write --config.validation.temp"),
        ({"n": 4}, r"--config.validation.n 4 with temperature 0"),  # GSM8K's own is greedy
        ({"every_steps": 0}, r"^--config.validation.every_steps: "),
        ({"every_steps": -1}, r"^--config.validation.every_steps: "),
        ({"max_new_tokens": 512}, r"^--config.validation.max_new_tokens 512: the model takes 512 tokens"),
        ({"after_train": "false", "before_train": "false"}, r"^--config.validation.after_train false: no step is"),
        ({"after_train": "false", "save_best": "true"}, r"^--config.validation.after_train false: no step is"),
        ({"datasets": "[]", "save_best": "true"}, r"^--config.validation.save_best true: there is no score to choose"),
        ({"every_step": 5}, r"unknown flag --config.validation.every_step; did you mean --config.validation.every_st"),
    ],
)
def test_mistakes_are_one_line_before_a_model_is_loaded(made, flags, tmp_path, monkeypatch, changes, said):
    monkeypatch.setattr("perl.training.grpo.load_model", lambda config: pytest.fail("a model was loaded"))
    given = {"validation.datasets": f'["{made / "others.jsonl"}"]', "training.output_dir": tmp_path / "run"}
    with pytest.raises(UserError, match=said) as caught:
        train(flags(given, {f"validation.{name}": value for name, value in changes.items()}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_two_files_of_one_name_are_told_apart_by_their_folders(made, flags, tmp_path):
    (tmp_path / "math").mkdir()
    shutil.copyfile(made / "others.jsonl", tmp_path / "math" / "others.jsonl")
    both = [str(made / "others.jsonl"), str(tmp_path / "math" / "others.jsonl")]
    config = parse(flags(VALIDATION, validation__datasets=json.dumps(both))).build()
    setup = set_up_validation(config, ChatTemplate(tiny_tokenizer()), set())
    assert setup is not None
    assert [each.name for each in setup.problem_sets] == [f"{made.name}_others", "math_others"]
    config.validation.datasets = [both[0], both[0]]
    with pytest.raises(UserError, match=r"^--config.validation.datasets: .* would both be written to .*others; leave"):
        set_up_validation(config, ChatTemplate(tiny_tokenizer()), set())


@pytest.mark.parametrize(("workers", "engine", "tp_size", "context"), [(0, "vllm", 2, 96), (1, "hf", 1, 512)])
def test_where_workers_draw_by_vllm_the_trainers_own_model_validates(made, flags, workers, engine, tp_size, context):
    changed: dict[str, Any] = {"validation__datasets": f'["{made / "others.jsonl"}"]', "rollout__engine": "vllm"}
    changed |= {"training__vllm_max_model_length": 96, "training__vllm_tensor_parallel_size": tp_size}
    config = parse(flags(VALIDATION, rollout__workers=workers, **changed)).build()
    setup = set_up_validation(config, ChatTemplate(tiny_tokenizer()), set())
    assert setup is not None
    assert (setup.engine, setup.tp_size, setup.context) == (engine, tp_size, context)


def test_it_asks_as_the_training_does(made, flags, tmp_path):
    """And as perl/eval.py --chat_template_kwargs: the template's arguments are the training's."""
    model, others, kwargs = tmp_path / "model", str(made / "others.jsonl"), {"enable_thinking": False}
    shutil.copytree(made / "model", model)
    (model / "chat_template.jinja").write_text(f"{CHAT_TEMPLATE}{{% if enable_thinking is false %}}0 0{{% endif %}}")
    changed = {"model__model_name_or_path": model, "validation__datasets": f'["{others}"]'}
    changed |= {"training__chat_template_kwargs": json.dumps(kwargs)}
    setup = check_run(parse(flags(VALIDATION, **changed)).build(), tmp_path / "run").validation
    assert setup is not None
    asked = EvalConfig(model=str(model), dataset=others, temperature=0.0, max_new_tokens=8, chat_template_kwargs=kwargs)
    (problem_set,) = setup.problem_sets
    evaluated_ = load_problem_set(asked, Setup.of(asked).template, others, "others")
    assert [s.token_ids for s in problem_set.samples] == [s.token_ids for s in evaluated_.samples]
    assert all(sample.prompt_text.endswith("0 0") for sample in problem_set.samples)
    assert problem_set.asked["chat_template_kwargs"] == kwargs


def test_a_setting_without_datasets_gets_a_warning(flags):
    parsed = parse(flags(validation__every_steps=5))
    assert "--config.validation.every_steps has no effect: validation.datasets is empty" in parsed.warnings


# Parts


def sample(key: str, index: int = 0, tokens: int = 3) -> Sample:
    problem = Problem(task="gsm8k", question=key, gold="1")
    return Sample(
        token_ids=(1,) * tokens, seed=0, dataset="d", key=key, index=index, problem=problem, prompt_text="text"
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_sample_is_one_processs_and_all_ask_for_as_many(world_size):
    given = [sample(f"k{i}", j, tokens=8 if i == 3 else 3) for i in range(6) for j in range(2)]
    shares = [share_of(given, rank, world_size, context=8) for rank in range(world_size)]
    own = [s.id for share in shares for s in [*share.asked[: share.local], *share.overlong]]
    assert sorted(own) == sorted(s.id for s in given)
    assert len({len(share.asked) for share in shares}) == 1
    assert [s.key for s in shares[0].overlong] == ["k3", "k3"]  # 8 tokens leave no room in 8
    for share in shares:  # the samples of a problem stand side by side
        keys = [s.key for s in share.asked]
        assert keys[::2] == keys[1::2]


def test_metrics_by_hand():
    """Two problems of four samples; c = 2 and 0 correct."""
    rows = [("a", 1.0, "5"), ("a", 0.0, "4"), ("a", 1.0, "5"), ("a", 0.0, "3"), *[("b", 0.0, None)] * 4]
    records: list[Any] = [
        record(key, i % 4, score=score, extracted=answer, tokens=i) for i, (key, score, answer) in enumerate(rows)
    ]
    records[7]["finish_reason"] = "length"
    assert metrics_of("gsm", records, 4) == pytest.approx(
        {
            "val-core/gsm/acc/mean@4": 0.25,
            "val-aux/gsm/acc/pass@2": (1 - 1 / 6) / 2,  # of the 6 pairs one has no correct answer
            "val-aux/gsm/acc/best@2/mean": (1 - 0.5**2) / 2,  # with replacement
            "val-aux/gsm/acc/maj@2": 0.25,
            "val-core/gsm/acc/pass@4": 0.5,
            "val-core/gsm/acc/best@4/mean": (1 - 0.5**4) / 2,
            "val-core/gsm/acc/maj@4": 0.5,  # 5, twice, is right
            "val-aux/gsm/truncated": 1 / 8,
            "val-aux/gsm/mean_length": 3.5,
        }
    )


def test_datasets_of_one_source_are_told_apart(made, flags, tmp_path):
    shutil.copyfile(made / "sums.jsonl", tmp_path / "easy.jsonl")
    row = {"data_source": "math_dapo", "prompt": [{"role": "user", "content": "1 + 1"}]}
    row |= {"reward_model": {"ground_truth": "2"}, "ability": "math", "extra_info": {}}
    (tmp_path / "mixed.jsonl").write_text(json.dumps(row) + "\n")
    files = [made / "others.jsonl", tmp_path / "easy.jsonl", tmp_path / "mixed.jsonl"]
    config = parse(flags(validation__datasets=json.dumps(list(map(str, files))))).build()
    setup = set_up_validation(config, ChatTemplate(tiny_tokenizer()), ())
    assert setup is not None
    assert validation.labels(setup.problem_sets) == {
        ("others", "openai/gsm8k"): "openai/gsm8k/others",
        ("easy", "openai/gsm8k"): "openai/gsm8k/easy",
        ("mixed", "math_dapo"): "math_dapo",
    }


def test_a_dataset_that_is_trained_on_gets_a_warning(made, flags, caplog):
    config = parse(flags(validation__datasets=f'["{made / "others.jsonl"}"]')).build()
    trained = {problem_hash(problem) for problem in load_problems(str(made / "others.jsonl"), limit=2)}
    set_up_validation(config, ChatTemplate(tiny_tokenizer()), trained)
    assert "the run trains on 2 of its 6 problems" in caplog.text


def test_the_best_is_the_first_of_the_highest(made, flags, tmp_path):
    config = parse(flags(validation__datasets=f'["{made / "others.jsonl"}"]', validation__save_best="true")).build()
    setup = set_up_validation(config, ChatTemplate(tiny_tokenizer()), ())
    assert setup is not None

    def save(folder: Path) -> None:
        folder.mkdir(parents=True)

    with Grader() as grader:
        one = Validation(setup, grader, tmp_path, 0, 1)
        for step, value in enumerate([0.2, 0.5, 0.5, 0.1]):
            one.keep_best(step, {one.chosen_by: value}, save)
        again = Validation(setup, grader, tmp_path, 0, 1)
    assert json.loads((tmp_path / "best" / "best.json").read_text())["step"] == 1
    assert again.best == 0.5


def test_a_torn_line_counts_as_not_validated(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "m": 0.5}\n{"step": 2, "reward": 1.0}\n{"step": 3, "m": 0.')
    assert logged_steps(file, "m") == {1}
    assert logged_steps(tmp_path / "missing.jsonl", "m") == set()


def test_the_progress_line_shows_the_scores(capsys):
    state = SimpleNamespace(is_world_process_zero=True, global_step=20, max_steps=100)
    logs = {"val-core/openai/gsm8k/acc/mean@1": 0.4521, "val-aux/openai/gsm8k/truncated": 0.0, "timing/validation": 3.0}
    ProgressLine().on_log(None, state, None, logs=logs)
    assert capsys.readouterr().out == "progress: step 20/100  validation  openai/gsm8k mean@1 0.452  3.0 s\n"


def test_the_last_step_is_validated_unless_after_train_is_false(made, flags, tmp_path):
    """verl's test_freq -1: nothing after any step."""
    datasets = {"validation.datasets": f'["{made / "others.jsonl"}"]', "validation.after_train": "false"}
    setup = set_up_validation(parse(flags(datasets)).build(), ChatTemplate(tiny_tokenizer()), ())
    assert setup is not None
    with Grader() as grader:
        one = Validation(setup, grader, tmp_path, 0, 1)
    assert [step for step in range(5) if one.due(step, 4)] == [0]
    setup.config.every_steps = 3
    assert [step for step in range(5) if one.due(step, 4)] == [0, 3]
    setup.config.after_train = True
    assert [step for step in range(5) if one.due(step, 4)] == [0, 3, 4]


@pytest.mark.parametrize("damaged", ["[1]", '{"metric": "a", "value": "b"}', "[" * 100_000, "5", "{"])
def test_a_best_score_that_is_damaged_counts_as_none_with_one_line(tmp_path, caplog, damaged):
    (tmp_path / "best").mkdir()
    best = tmp_path / "best" / "best.json"
    best.write_text(json.dumps({"step": 2, "metric": "a", "value": 1, "metrics": {"a": 1}}))
    assert (best_so_far(tmp_path, "a"), best_so_far(tmp_path, "b")) == (1.0, None)
    best.write_text(damaged)
    assert best_so_far(tmp_path, "a") is None
    (line,) = caplog.messages
    assert "best.json is not readable (" in line
