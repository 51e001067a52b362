"""Mistakes that need no model to be seen."""

import pytest

from perl.base.errors import UserError
from perl.config.load import parse
from perl.engines.quantised_base import check_drawn
from perl.runs.setup import model_dtype
from perl.training.preflight import check_engine, check_sampling, check_training


def config(*flags):
    return parse(["--recipe", "recipes/quickstart.yaml", *flags]).build(processes=1)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("top_p", "2", "top_p: 2.0 is not possible; write a value above 0 and at most 1"),
        ("temperature", "0", "temperature 0: the completions of a group would all be the same"),
        ("temperature", "-1", "temperature: -1.0 is not possible"),
        ("repetition_penalty", "0", "repetition_penalty: 0.0 is not possible"),
        ("generation_kwargs", '{"num_beams": 4}', "generation_kwargs: num_beams has no place in a rollout"),
        ("generation_kwargs", '{"guidance_scale": 1.5}', "generation_kwargs: guidance_scale has no place in a rollout"),
        ("generation_kwargs", '{"token_healing": true}', "generation_kwargs: token_healing has no place in a rollout"),
        ("generation_kwargs", '{"max_new_tokens": 9}', "generation_kwargs: max_new_tokens has no place in a rollout"),
        ("generation_kwargs", '{"top_kk": 4}', "generation_kwargs: unknown name 'top_kk'; write .*, such as top_k, "),
        ("generation_kwargs", '{"top_p": 0}', "top_p: 0.0 is not possible"),
        ("generation_kwargs", '{"disable_compile": true}', "generation_kwargs: disable_compile has no place"),
        ("generation_kwargs", '{"do_sample": false}', "generation_kwargs: without sampling .do_sample false, temper"),
        ("generation_kwargs", '{"temperature": 0}', "generation_kwargs: without sampling"),
        (
            "generation_kwargs",
            '{"temperature": 0.5}',
            "generation_kwargs: temperature 0.5 is not that of the loss; write --config.training.temperature 0.5",
        ),
    ],
)
def test_a_distribution_that_there_is_not(flag, value, said):
    with pytest.raises(UserError, match=f"--config.training.{said}"):
        check_sampling(config(f"--config.training.{flag}", value).training)


def test_vllms_generation_kwargs_have_the_losss_temperature_too():
    flags = "--config.rollout.engine", "vllm", "--config.training.generation_kwargs"
    check_sampling(config(*flags, '{"temperature": 1.0}').training)
    with pytest.raises(UserError, match=r"temperature 0\.5 is not that of the loss"):
        check_sampling(config(*flags, '{"temperature": 0.5}').training)


def test_the_recipes_own_sampling_is_one():
    check_sampling(config().training)


@pytest.mark.parametrize("field", ["save_only_model", "enable_jit_checkpoint"])
def test_a_checkpoint_that_no_run_goes_on_from_as_before_is_refused(field):
    with pytest.raises(UserError, match=f"^--config.training.{field} true: .*; leave it out"):
        check_training(config(f"--config.training.{field}", "true").training)


def test_two_flags_with_two_dtypes():
    flags = "--config.training.model_init_kwargs", '{"dtype": "float16"}', "--config.model.dtype"
    assert str(model_dtype(config(*flags, "float16"))) == "torch.float16"
    with pytest.raises(UserError, match=r"dtype float16 is not that of --config.model.dtype \(float32\)"):
        model_dtype(config(*flags, "float32"))


@pytest.mark.parametrize("ahead", ["lag", "max_staleness"])
def test_an_older_policy_needs_gathered_weights_under_zero3(ahead):
    """The first batch that an older policy drew ended in a traceback."""
    flags = ["--config.rollout.workers", "1", f"--config.rollout.{ahead}", "1"]
    flags += ["--config.training.ds3_gather_for_generation"]
    check_engine(config(*flags, "true"), "zero3")
    said = f"^--config.rollout.{ahead} 1: under ZeRO-3 an older policy .*; set that to true, or write .*{ahead} 0$"
    with pytest.raises(UserError, match=said):
        check_engine(config(*flags, "false"), "zero3")


@pytest.mark.parametrize("engine", ["fast", "vllm"])
def test_so_does_noise(engine):
    """With vLLM a warning said that the flag had no effect, and the first comparison ended in an error about it."""
    flags = ["--config.rollout.engine", engine, "--config.training.ds3_gather_for_generation", "false"]
    with pytest.raises(UserError, match=r"enabled true: under ZeRO-3 noise is put .* or write .*enabled false$"):
        check_engine(config(*flags, "--config.noise_injection.enabled", "true"), "zero3")


def test_under_fsdp2_a_quantised_base_is_the_workers():
    flags = ["--config.rollout.quantization", "int8"]
    with pytest.raises(UserError, match=r"int8: FSDP2 gathers .* to draw; write --config\.rollout\.workers 1 or more"):
        check_drawn(config(*flags), "npu", "fsdp2")
    flags += ["--config.rollout.workers", "1", "--config.validation.quantized"]
    check_drawn(config(*flags, "false"), "npu", "fsdp2")
    check_drawn(config(*flags, "true"), "npu", "fsdp2")  # nothing is validated
    flags += ["true", "--config.validation.datasets", '["gsm8k"]']
    with pytest.raises(UserError, match=r"to validate; write --config\.validation\.quantized false$"):
        check_drawn(config(*flags), "npu", "fsdp2")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("rollout.workers 4", None),
        ("rollout.workers 6", "6: no more than 4 pieces of 128 completions are handed out at once, and the other"),
        ("rollout.workers 6", "draw; write --config.rollout.piece_size 80, or --config.rollout.workers 4"),
        ("rollout.workers 5, algorithm.name remax", None),  # and one of greedy completions
        ("rollout.workers 8, rollout.lag 1", None),
        ("rollout.workers 9, rollout.lag 1", "write --config.rollout.piece_size 96, or --config.rollout.workers 8"),
        ("rollout.workers 64, rollout.piece_size 512", "draw; write --config.rollout.workers 1"),
        ("rollout.workers 64, rollout.max_staleness 1", None),
        ("rollout.workers 65, rollout.max_staleness 1", "draw; write --config.rollout.workers 64"),
    ],
)
def test_workers_for_which_there_is_no_piece_are_told_once(flags, said, caplog):
    """A generation batch of 512 completions in 32 groups."""
    batch = ["training.per_device_train_batch_size 512", "training.num_generations 16", *flags.split(", ")]
    check_engine(config(*[word for each in batch for word in f"--config.{each}".split()]), "")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(said)
    assert not said or said in lines[0]


RAY = ["--config.rollout.workers", "1", "--config.rollout.executor", "ray", "--config.rollout.ray_address"]


def test_ray_is_looked_for_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^--config\.rollout\.executor ray: ray is not installed; pip install"):
        check_engine(config(*RAY, "auto"), "")


@pytest.mark.ray
def test_so_is_a_cluster():
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=r"^--config\.rollout\.ray_address 127\.0\.0\.1:1: no Ray cluster answers"):
        check_engine(config(*RAY, "127.0.0.1:1"), "")
