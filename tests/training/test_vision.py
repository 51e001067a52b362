"""Qwen2.5-VL: what it learns on images is what TRL's trainer learns, and a whole run with validation and evaluation."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from datasets import Image, List
from trl import GRPOTrainer

from perl.base.errors import UserError
from perl.config.evaluation import EvalConfig
from perl.config.schema import DatasetConfig, PeftConfig
from perl.evaluation.run import evaluate
from perl.finetuning.sft import fine_tune
from perl.models.folders import ADAPTER_CONFIG, load_model
from perl.models.images import decoded, load_processing
from perl.prompts import ChatTemplate
from perl.runs.setup import build_dataset
from perl.runs.vision import VISION_TOWER, check_mixed_rows
from perl.scoring.results import read_samples
from perl.training.grpo import train
from perl.training.trainer import PerlGRPOTrainer
from tests.folders import adapter_of, metrics
from tests.tiny import geometry_file, geometry_rows, noise_png, save_tiny, save_tiny_vision
from tests.trainers import make_trainer, reward_tokens
from tests.training.injected import LONGEST, inject

ROOT = Path(__file__).parents[2]
STEPS = {
    "training.max_steps": 2,
    "training.per_device_train_batch_size": 2,
    "training.gradient_accumulation_steps": 2,
    "training.num_generations": 4,
    "training.num_iterations": 2,
    "training.max_completion_length": 8,
    "training.learning_rate": 0.01,
    "training.logging_steps": 1,
    "training.save_steps": 1,
    "training.beta": 0.01,
    "training.report_to": "none",
    "peft.r": 4,
}
"""Two updates of one rollout, of micro-batches of two rows; a checkpoint between them holds pixels."""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """model/, train.parquet and others.parquet with none to two images a row, and a reward."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny_vision(folder / "model")
    geometry_file(folder / "train.parquet", (1, 2, 0, 1, 2, 1, 0, 1))
    geometry_file(folder / "others.parquet", (2, 1, 0))
    (folder / "irregular.py").write_text(
        "def irregular(completion_ids, **kwargs):\n"
        "    return [sum((7 * i + 3) * t for i, t in enumerate(ids)) % 101 / 101 for ids in completion_ids]\n"
    )
    return folder


def flags(made: Path, **changes: Any) -> list[str]:
    """Flags of a run in whose names __ is a dot."""
    given = STEPS | {
        "model.model_name_or_path": made / "model",
        "dataset.dataset_name_or_path": made / "train.parquet",
        "reward.functions": json.dumps(["accuracy", "think", f"{made / 'irregular.py'}:irregular"]),
    }
    given |= {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in given.items() for word in (f"--config.{name}", str(value))]


NOISY = {"noise_injection__enabled": "true", "noise_injection__num_stages": 2}


@pytest.fixture(scope="module")
def trained(made) -> Path:
    """A run under noise on the language model's norms, validated before it and after its two steps."""
    validated = {"validation__datasets": json.dumps([str(made / "others.parquet")]), "validation__max_new_tokens": 12}
    return train(flags(made, training__output_dir=made / "run", **NOISY, **validated))


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
        {"num_iterations": 2, "beta": 0.1, "loss_type": "bnpo"},
        {"gradient_checkpointing": True, "loss_type": "grpo"},
    ],
    ids=["small micro-batches", "a rollout used twice", "gradient checkpointing"],
)
def test_it_learns_what_trl_learns(made, tmp_path, settings):
    def learned(kind):
        data = DatasetConfig(dataset_name_or_path=str(geometry_file(tmp_path / "train.parquet")))
        processor = load_processing(made / "model", padding_side="left")
        dataset = build_dataset(data, ChatTemplate(processor))
        if kind is GRPOTrainer:  # which takes decoded images
            dataset = dataset.cast_column("images", List(Image()))
        trainer = make_trainer(
            tmp_path / kind.__name__,
            kind=kind,
            model=load_model(made / "model"),
            tokenizer=processor,
            dataset=dataset,
            rewards=[reward_tokens],
            peft=PeftConfig(r=4, lora_alpha=8, exclude_modules=VISION_TOWER),
            max_completion_length=LONGEST,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            **settings,
        )
        inject(trainer)
        trainer.train()
        steps = [row for row in trainer.state.log_history if "loss" in row]
        return steps, {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}

    (mine, our_adapter), (theirs, their_adapter) = learned(PerlGRPOTrainer), learned(GRPOTrainer)
    assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in theirs], rel=1e-6, abs=1e-6)
    assert [row["grad_norm"] for row in mine] == pytest.approx([row["grad_norm"] for row in theirs], rel=1e-4)
    assert min(row["grad_norm"] for row in theirs) > 0
    assert our_adapter.keys() == their_adapter.keys()
    assert not [name for name in our_adapter if "visual" in name]
    for name, tensor in their_adapter.items():
        assert (our_adapter[name] - tensor).abs().max() <= 1e-6, name
    assert max(t.abs().max() for name, t in their_adapter.items() if "lora_B" in name) > 1e-6


def test_a_run_samples_what_it_trains(trained):
    steps = [row for row in metrics(trained) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert steps[0]["rollout/logp_mismatch"] < 1  # noise is part of it
    assert steps[0]["aqn/num_modules"] == 2  # post_attention_layernorm of the two layers of the language model
    assert all("perf/mfu" not in row for row in steps)


def test_without_noise_the_sampler_is_the_trainer_in_float32(made, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        run = train(flags(made, training__output_dir=tmp_path / "run", training__num_iterations=1))
    steps = [row for row in metrics(run) if "loss" in row]
    assert max(row["rollout/logp_mismatch"] for row in steps) < 1e-5
    said = " ".join(record.message for record in caplog.records)
    assert "rollouts: sampler and trainer agree" in said
    assert "the adapter is on the linear layers of the language model, the vision tower has none" in said
    assert "micro-batches are padded, not packed" in said


def test_the_adapter_is_the_language_models(trained):
    names = adapter_of(trained)
    assert {name.split(".layers.")[0] for name in names} == {"base_model.model.model.language_model"}
    assert len(names) == 2 * 2 * 7  # A and B of q, k, v, o, gate, up, down in two layers
    saved = json.loads((trained / "adapter" / ADAPTER_CONFIG).read_text())
    assert saved["exclude_modules"] == VISION_TOWER
    assert (trained / "adapter" / "processor_config.json").is_file()


def test_asked_for_it_the_vision_tower_is_adapted_too(made, tmp_path):
    asked = {"peft__exclude_modules": "[]", "training__max_steps": 1, "training__save_strategy": "no"}
    names = adapter_of(train(flags(made, training__output_dir=tmp_path / "run", **asked)))
    assert any(".visual.blocks.0.attn.qkv." in name for name in names)
    assert any(".language_model.layers.0." in name for name in names)


def without_time(records: dict) -> dict:
    return {row: {k: v for k, v in record.items() if k != "time"} for row, record in records.items()}


def test_its_merged_adapter_is_evaluated_as_it_was_validated(made, trained, tmp_path):
    data, result = made / "others.parquet", tmp_path / "result"
    words = [str(trained / "adapter")]
    evaluate(EvalConfig(str(made / "model"), str(data), str(result), words, max_new_tokens=12))
    theirs = without_time(read_samples(result / "others" / "samples.jsonl"))
    ours = {
        step: without_time(read_samples(trained / f"validation/step-{step}/others/samples.jsonl")) for step in (0, 2)
    }
    assert len(theirs) == 3
    assert ours[2] == theirs
    assert ours[0] != theirs  # or the adapter would change nothing
    tokens = sorted(record["prompt_tokens"] for record in theirs.values())
    assert tokens[2] - tokens[1] > 9 > 6  # the row of two images has 6 + 9 tokens of these


def test_a_resumed_run_ends_as_one_that_was_not_stopped(made, trained, tmp_path):
    half = train(flags(made, training__output_dir=tmp_path / "run", training__max_steps=2, **NOISY))
    whole = adapter_of(half)
    (tmp_path / "run" / "adapter").rename(tmp_path / "first")
    more = {"training__resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-1")}
    again = adapter_of(train(flags(made, training__output_dir=tmp_path / "run", **NOISY, **more)))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert all(torch.equal(whole[name], tensor) for name, tensor in adapter_of(trained).items())  # nor by a validation


@pytest.mark.slow
def test_workers_draw_the_same_of_images(made, tmp_path):
    """Prompts with their images cross to a worker, which has a processor of its own."""
    alone, drawn = (
        train(flags(made, training__output_dir=tmp_path / f"{workers}", rollout__workers=workers,
                    rollout__piece_size=4, **NOISY))
        for workers in (0, 1)
    )  # fmt: skip
    assert all(row["rollout/engine_mismatch"] < 1e-5 for row in metrics(drawn) if "rollout/engine_mismatch" in row)
    first, second = adapter_of(alone), adapter_of(drawn)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_two_ranks(made, tmp_path):
    """Of four rows each; at times one rank alone has images."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    command = [*launcher, str(ROOT / "scripts/accelerate/cpu.yaml"), "-m", "perl.train"]
    done = subprocess.run(
        [*command, *flags(made, training__output_dir=tmp_path / "run", training__num_iterations=1)],
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert max(row["rollout/logp_mismatch"] for row in steps) < 1e-5
    assert any(tensor.abs().max() > 0 for name, tensor in adapter_of(tmp_path / "run").items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout__engine": "vllm"},
            "--config.rollout.engine vllm: completes prompt",
        ),
        (
            {"algorithm__dynamic_sampling": "true", "training__num_iterations": 1},
            "--config.algorithm.dynamic_sampling: its passes see prompts without their images; name a model of texts",
        ),
        (
            {"algorithm__kl_in_reward": "0.1", "training__beta": 0},
            "--config.algorithm.kl_in_reward: its passes see prompts without their images",
        ),
        (
            {"dataset__truncation": "left", "dataset__filter_overlong_prompts": "false"},
            "--config.dataset.truncation left: a prompt with images can't be cut; use",
        ),
    ],
)
def test_what_images_do_not_go_with_is_refused_at_the_start(made, tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        train(flags(made, training__output_dir=tmp_path / "run", **changes))
    assert str(error.value).startswith(message)
    assert not (tmp_path / "run").exists()


def test_images_for_a_model_of_texts_are_refused_at_the_start(made, tmp_path):
    model = save_tiny(tmp_path / "model")
    with pytest.raises(UserError, match=r"^train.parquet:1: the row has 1 image\(s\), but the model takes texts only"):
        train(flags(made, model__model_name_or_path=model, training__output_dir=tmp_path / "run"))


def test_fine_tuning_is_refused_at_the_start(made, tmp_path):
    words = ["--config.model.model_name_or_path", made / "model", "--config.dataset.dataset_name_or_path", "gsm8k"]
    with pytest.raises(UserError, match=r"perl.sft takes no vision-language model; name one of texts alone$"):
        fine_tune([*map(str, words), "--config.training.output_dir", str(tmp_path / "run")])


def test_prompts_that_are_too_long_with_their_images_are_dropped(made, tmp_path):
    """An image of 64 x 64 pixels has 64 tokens."""
    rows = geometry_rows((1, 1))
    rows[0]["images"] = [{"bytes": noise_png(64, 64), "path": None}]
    (tmp_path / "a.png").write_bytes(noise_png(64, 64))
    file = tmp_path / "train.jsonl"
    for row in rows:
        row["images"] = [str(tmp_path / "a.png")] if row is rows[0] else []
        row["prompt"][0]["content"] = "<image> so" if row is rows[0] else "so"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    processor = load_processing(made / "model")
    kept = build_dataset(DatasetConfig(dataset_name_or_path=str(file), max_prompt_length=60), ChatTemplate(processor))
    assert [row["prompt"][0]["content"] for row in kept] == [[{"type": "text", "text": "so"}]]
    both = build_dataset(DatasetConfig(dataset_name_or_path=str(file), max_prompt_length=80), ChatTemplate(processor))
    assert [[PIL.Image.open(io.BytesIO(image["bytes"])).size for image in row["images"]] for row in both] == [
        [(64, 64)],
        [],
    ]


def test_an_image_that_comes_for_each_completion_is_computed_once(made):
    processor = load_processing(made / "model").image_processor
    one, other = (decoded(noise_png(32, 16 * (1 + seed), seed)) for seed in range(2))
    apart = [processor(images=[image], return_tensors="pt") for image in (one, other)]
    resize, resized = processor.resize, []

    def counted(image, *args, **kwargs):
        resized.append(image.shape)
        return resize(image, *args, **kwargs)

    processor.resize = counted
    together = processor(images=[one, other, one, one, other], return_tensors="pt")
    assert len(resized) == 2
    for name in ("pixel_values", "image_grid_thw"):
        expected = torch.cat([apart[place][name] for place in (0, 1, 0, 0, 1)])
        assert torch.equal(together[name], expected), name


def test_mixed_rows_are_refused_where_weights_are_split(made, tmp_path):
    processor = load_processing(made / "model", padding_side="left")

    def rows(*images):
        file = geometry_file(tmp_path / f"{len(images)}.parquet", images)
        return build_dataset(DatasetConfig(dataset_name_or_path=str(file)), ChatTemplate(processor))

    mixed = rows(1, 0, 2)
    for strategy in ("zero3", "fsdp2"):
        check_mixed_rows(rows(1, 2), strategy)
        with pytest.raises(UserError, match=f"1 of 3 rows have no image, and with {strategy}"):
            check_mixed_rows(mixed, strategy)
    check_mixed_rows(mixed, "ddp")
