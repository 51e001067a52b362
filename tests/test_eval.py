"""python perl/eval.py as a user meets it: help, one-line errors before any model is loaded, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perl.base.errors import UserError
from perl.config.evaluation import find_files, parse
from perl.eval import main
from tests.results import record
from tests.tiny import save_tiny, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    file.write_text(json.dumps({"question": "What is 1 + 2 ?", "answer": "#### 3"}) + "\n")
    return file


def test_runs_from_any_folder_as_file_and_as_module(model, sums, tmp_path):
    """The second has nothing left to generate."""
    flags = ["--model", str(model), "--dataset", str(sums), "--max_new_tokens", "4", "--result_dir", str(tmp_path)]
    for how, place in (([str(ROOT / "perl" / "eval.py")], tmp_path), (["-m", "perl.eval"], ROOT)):
        words = [sys.executable, *how, *flags]
        run = subprocess.run(words, cwd=place, capture_output=True, text=True, check=False, timeout=200)
        assert run.returncode == 0, run.stderr
        assert "avg@1" in run.stdout
        assert "1 problems × 1" in run.stdout
        assert (tmp_path / "report.html").is_file()
        (tmp_path / "report.html").unlink()


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag in ("--model MODEL folder or hub name", "--adapter_mode {merge,lora} merge writes", "--use_vllm"):
        assert flag in text


def test_what_is_missing_is_named_as_it_is_written():
    with pytest.raises(UserError, match=r"^missing: --model, --dataset; see --help$"):
        main([])


def test_use_vllm_is_a_switch():
    common = ["--model", "m", "--dataset", "gsm8k"]
    assert parse(common).use_vllm is False
    assert parse([*common, "--use_vllm"]).use_vllm is True
    assert parse([*common, "--use_vllm", "--dp_size", "4"]).dp_size == 4
    assert parse([*common, "--use_vllm=false"]).use_vllm is False


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dpsize", "2"], "unknown flag --dpsize; did you mean --dp_size"),
        (["--max_new", "2"], "unknown flag --max_new"),
        (["--dp_size", "0"], "--dp_size"),
        (["--top_p", "1.5"], "--top_p"),
        (["--tp_size", "2"], "add --use_vllm"),
        (["--use_vllm", "--max_batch_tokens", "9"], "vLLM sizes its own cache"),
        (["--gpu_memory_utilization", "0.5"], "--gpu_memory_utilization 0.5: is vLLM's; add --use_vllm"),
        (["--enforce_eager"], "--enforce_eager true: is vLLM's; add --use_vllm"),
        (["--use_vllm", "--gpu_memory_utilization", "0"], "a share above 0"),
        (["--limit", "5"], "unknown flag --limit; did you mean --max_samples?"),
        (["--num_fewshot=4"], "unknown flag --num_fewshot; did you mean --few_shot?"),
        (["--output_path", "out"], "unknown flag --output_path; did you mean --result_dir?"),
        (["--gen_kwargs", "temperature=0.7"], "unknown flag --gen_kwargs; --help lists the known ones"),
        (["--adapter_mode", "lora"], "no --adapter to serve"),
        (["--adapter_mode", "lora", "--adapter", "a"], "needs --use_vllm"),
        (["--dataset", " , "], "--dataset is empty"),
        (["--chat_template_kwargs", "[1]"], "--chat_template_kwargs: expected a JSON object or null, not [1]"),
    ],
)
def test_wrong_flags_are_one_line(flags, message):
    with pytest.raises(UserError) as error:
        parse(["--model", "m", "--dataset", "gsm8k", *flags])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def without_template(folder: Path) -> Path:
    save_tiny(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tiny_tokenizer(chat_template=None).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "no/such/folder"}, "no such folder"),
        ({"--dataset": "gsm9k"}, "did you mean 'gsm8k'"),
        ({"--dataset": "missing.jsonl"}, "missing.jsonl"),
        ({"--task": "gsm9k"}, "gsm9k"),
        ({"--adapter": "nowhere"}, "no such folder"),
        ({"--dp_size": "4096"}, "there are"),
        ({"--max_model_len": "100000"}, "the model takes 512 tokens"),
        ({"--n": "4"}, "greedy completions"),
        ({"--few_shot": "shots.jsonl"}, "no such file"),
        ({"--compare": "nowhere"}, "--compare nowhere: no such folder"),
        ({"--compare": "RESULTS/out"}, "is the folder of --result_dir itself"),
        ({"--compare": "RESULTS/differences"}, "no problem is in both"),
        ({"--result_dir": "RESULTS/sweep"}, "/sweep: holds a sweep, and this is a single evaluation; name another"),
        ({"--result_dir": "RESULTS/single", "--adapter": "RESULTS/run"}, "holds a single evaluation, and this is"),
        ({"template": "without"}, "no chat template"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(model, sums, tmp_path, monkeypatch, change, message):
    if change.pop("template", None):
        model = without_template(tmp_path / "bare")
    (tmp_path / "differences" / "sums").mkdir(parents=True)
    (tmp_path / "differences" / "sums" / "samples.jsonl").write_text(json.dumps(record("0-0")) + "\n")
    (tmp_path / "single" / "sums").mkdir(parents=True)
    (tmp_path / "single" / "sums" / "run.json").write_text("{}")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    for step in (1, 2):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "run" / f"checkpoint-{step}" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (tmp_path / "run" / f"checkpoint-{step}" / "adapter_model.safetensors").write_bytes(bytes([step]))
    change = {flag: value.replace("RESULTS", str(tmp_path)) for flag, value in change.items()}
    flags = {"--model": str(model), "--dataset": str(sums), "--result_dir": str(tmp_path / "out"), **change}
    monkeypatch.setattr("perl.evaluation.generate.WorkerPool", None)
    monkeypatch.setattr("perl.evaluation.weights.merge_adapter", None)
    with pytest.raises(UserError) as error:
        main([word for pair in flags.items() for word in pair])
    assert message in str(error.value)


def test_a_page_that_can_not_be_made_is_a_line_and_the_scores_count(model, sums, tmp_path, caplog):
    flags = ["--model", str(model), "--dataset", str(sums), "--max_new_tokens", "4", "--result_dir"]
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert main([*flags, str(tmp_path / "out")]) == 0
    assert "no report, which python -m perl report makes too: " in caplog.text
    assert (tmp_path / "out" / "sums" / "summary.json").is_file()


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = parse(["--model", "m", "--dataset", "gsm8k", "--result_dir", "~/out", "--compare", "~/before"])
    config, _ = find_files(given)
    assert (config.result_dir, config.compare) == (f"{tmp_path}/out", f"{tmp_path}/before")
    assert find_files(parse(["--model", "m", "--dataset", "gsm8k"]))[0].compare is None


def test_the_report_shows_what_the_run_was_compared_with(model, sums, tmp_path, capsys):
    """The report is written last, after the comparison that the same command makes."""
    flags = ["--model", str(model), "--dataset", str(sums), "--max_new_tokens", "4", "--result_dir"]
    assert main([*flags, str(tmp_path / "a")]) == 0
    assert main([*flags, str(tmp_path / "b"), "--compare", str(tmp_path / "a")]) == 0
    assert "both are the same model" in capsys.readouterr().out
    assert 'class="compared"' not in (tmp_path / "a" / "report.html").read_text()
    text = (tmp_path / "b" / "report.html").read_text()
    assert f"Compared with {model.name}</h2>" in text
    assert "both: the same model." in text


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--datasets", "unknown flag --datasets; did you mean --dataset?"),
        ("--tasks", "unknown flag --tasks; did you mean --dataset?"),
    ],
)
def test_a_users_mistake_ends_with_code_2_and_one_line(flag, said):
    words = [sys.executable, str(ROOT / "perl" / "eval.py"), "--model", "m", flag, "gsm8k"]
    run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == f"error: {said}\n"
