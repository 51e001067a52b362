"""python -m perl prepare: verl's columns, repeats, conflicts, golds that fail, and the way back."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from perl.base.errors import UserError
from perl.config.parser import Parser
from perl.prompts import build_messages
from perl.tasks import TASKS, load_problems
from perl.tools import prepare
from tests.tiny import noise_png

SHARED = Path(__file__).parents[3] / "shared" / "data"


def run(*arguments: str) -> int:
    parser = Parser(prog="prepare")
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args(list(arguments)))


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def gsm8k_row(number: int) -> dict:
    return {"question": f"How much is {number}?", "answer": f"It is {number}.\n#### {number:,}"}


def dapo_row(question: str, gold: str) -> dict:
    return {"prompt": question, "solution": gold, "data_source": "math_dapo"}


def test_problems_keep_their_images_and_differ_by_them(tmp_path):
    files = [noise_png(16, 24, seed) for seed in range(3)]
    paths = []
    for split in ("train", "test"):
        rows = [{"problem": "<image>Find x.", "answer": str(n), "images": [{"bytes": f}]} for n, f in enumerate(files)]
        table = pyarrow.Table.from_pylist(rows[:2] if split == "train" else rows[2:])
        paths.append(str(tmp_path / f"{split}.parquet"))
        pyarrow.parquet.write_table(table, paths[-1])
    assert run("geometry3k", "--local_save_dir", str(tmp_path / "out"), "--source", *paths) == 0
    problems = load_problems(str(tmp_path / "out" / "train.parquet"))
    assert [problem.images for problem in problems] == [(file,) for file in files[:2]]
    assert [problem.task for problem in problems] == ["geometry3k"] * 2


def test_images_are_kept_where_the_first_row_has_none(tmp_path):
    image = noise_png(16, 24, 1)
    rows = [
        {"problem": "What is 2 + 2?", "answer": "4", "images": []},
        {"problem": "<image>Find x.", "answer": "5", "images": [{"bytes": image}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    source = str(tmp_path / "train.parquet")
    assert run("geometry3k", "--local_save_dir", str(tmp_path / "out"), "--source", source, "--test_rows", "0") == 0
    problems = load_problems(str(tmp_path / "out" / "train.parquet"))
    assert [problem.images for problem in problems] == [(), (image,)]


def test_gsm8k_gets_verls_columns_and_answer(tmp_path, capsys):
    train = write(tmp_path / "train.jsonl", [gsm8k_row(1080), gsm8k_row(2)])
    test = write(tmp_path / "test.jsonl", [gsm8k_row(3)])
    out = tmp_path / "out" / "gsm8k"
    assert run("gsm8k", "--local_save_dir", str(out), "--source", train, test) == 0
    rows = pyarrow.parquet.read_table(out / "train.parquet").to_pylist()
    assert rows[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'How much is 1080? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1080"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "question": "How much is 1080?",
            "answer": "It is 1080.\n#### 1,080",
        },
        "answer": "1080",
    }
    assert "train.parquet: 2 rows; 0 golds do not pass" in capsys.readouterr().out
    assert sorted(file.name for file in out.iterdir()) == ["test.parquet", "train.parquet"]


def test_what_is_prepared_is_loaded_back_with_the_same_prompt(tmp_path):
    source = write(tmp_path / "train.jsonl", [gsm8k_row(7)])
    run("gsm8k", "--local_save_dir", str(tmp_path / "out"), "--source", source, "--test_rows", "0")
    (bare,) = load_problems(source)
    (ready,) = load_problems(str(tmp_path / "out"), "train")
    style = TASKS["gsm8k"].style
    assert (ready.task, ready.gold) == ("gsm8k", "7")
    assert build_messages(ready, style) == build_messages(bare, style)


def test_dapo_drops_repeats_and_conflicts_and_says_so(tmp_path, capsys):
    rows = [dapo_row(f"Find {n}.", str(n)) for n in range(20)]
    rows += [dapo_row("Find 3. ", "3"), dapo_row("Find  3.", "3")]  # the same but for white space
    rows += [dapo_row("Odd?", "5"), dapo_row("Odd?", "6"), dapo_row("Odd?", "5")]
    source = write(tmp_path / "rows.jsonl", rows)
    assert run("dapo-math", "--local_save_dir", str(tmp_path / "out"), "--source", source) == 0
    out = capsys.readouterr().out
    assert "train: 2 exact repeats dropped" in out
    assert "train: 1 prompts with conflicting golds: all their 3 rows dropped" in out
    assert "rows.jsonl:23 says 5, rows.jsonl:24 says 6, rows.jsonl:25 says 5" in out
    train = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    test = pyarrow.parquet.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert (len(train), len(test)) == (18, 2)  # a tenth is held out
    assert sorted(int(row["answer"]) for row in train + test) == list(range(20))
    assert {row["data_source"] for row in train} == {"math_dapo"}


@pytest.mark.parametrize("below", ["", "data", "main"])
def test_a_folder_is_read_wherever_the_hub_keeps_its_files(below, tmp_path):
    folder = tmp_path / "gsm8k" / below
    folder.mkdir(parents=True)
    write(folder / "train-00000-of-00002.jsonl", [gsm8k_row(1)])
    write(folder / "train-00001-of-00002.jsonl", [gsm8k_row(2)])
    write(folder / "test-00000-of-00001.jsonl", [gsm8k_row(3)])
    assert run("gsm8k", "--local_save_dir", str(tmp_path / "out"), "--source", str(tmp_path / "gsm8k")) == 0
    assert [p.gold for p in load_problems(str(tmp_path / "out"), "train")] == ["1", "2"]
    assert [p.gold for p in load_problems(str(tmp_path / "out"), "test")] == ["3"]


def test_rows_that_are_in_test_as_well_are_not_trained_on(tmp_path, capsys):
    train = write(tmp_path / "train.jsonl", [gsm8k_row(number) for number in range(5)])
    test = write(tmp_path / "test.jsonl", [gsm8k_row(number) for number in (3, 4, 5)])
    out = ["--local_save_dir", str(tmp_path / "out"), "--source"]
    assert run("gsm8k", *out, train, test) == 0
    assert "train: 2 rows that are in test as well dropped" in capsys.readouterr().out
    assert [problem.gold for problem in load_problems(str(tmp_path / "out" / "train.parquet"))] == ["0", "1", "2"]
    assert len(load_problems(str(tmp_path / "out" / "test.parquet"))) == 3
    other = write(tmp_path / "train_3.jsonl", [gsm8k_row(3)])
    with pytest.raises(UserError, match="all rows of train are in test as well"):
        run("gsm8k", *out, other, test)


def test_of_fewer_than_ten_rows_none_is_held_out(tmp_path, capsys):
    source = write(tmp_path / "rows.jsonl", [dapo_row(f"Find {n}.", str(n)) for n in range(5)])
    assert run("dapo-math", "--local_save_dir", str(tmp_path / "out"), "--source", source) == 0
    assert "test: none, as a tenth of 5 rows is less than one" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["train.parquet"]
    assert len(load_problems(str(tmp_path / "out"))) == 5


def test_a_split_of_an_earlier_run_is_not_left_beside_all_rows(tmp_path):
    """The rows that it had held out would be in train.parquet too."""
    source = write(tmp_path / "rows.jsonl", [dapo_row(f"Find {n}.", str(n)) for n in range(40)])
    command = "dapo-math", "--local_save_dir", str(tmp_path / "out"), "--source", source, "--test_rows"
    assert run(*command, "4") == 0
    with pytest.raises(UserError, match=r"out: test\.parquet is there already, .*; remove it, or write another"):
        run(*command, "0")
    assert len(load_problems(str(tmp_path / "out"), "train")) == 36
    assert run(*command, "3") == 0  # both are written anew


def test_held_out_rows_do_not_depend_on_the_order(tmp_path):
    rows = [dapo_row(f"Find {n}.", str(n)) for n in range(40)]
    answers = []
    for name, ordered in (("a", rows), ("b", rows[::-1])):
        source = write(tmp_path / f"{name}.jsonl", ordered)
        run("dapo-math", "--local_save_dir", str(tmp_path / name), "--source", source, "--test_rows", "3")
        answers.append({problem.gold for problem in load_problems(str(tmp_path / name), "test")})
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3


def test_a_gold_that_fails_its_own_verifier_is_reported_and_kept(tmp_path, capsys, caplog):
    source = write(tmp_path / "test.jsonl", [gsm8k_row(1), {"question": "Who?", "answer": "#### Janet"}])
    run("gsm8k", "--local_save_dir", str(tmp_path / "out"), "--source", source)
    assert "test.parquet: 2 rows; 1 golds do not pass their own verifier (kept)" in capsys.readouterr().out
    assert "test.jsonl:2 ('Janet')" in caplog.text


def test_a_bench_is_a_test_set(tmp_path):
    source = write(tmp_path / "aime24.jsonl", [{"problem": "Find it.", "answer": "025"}])
    run("aime24", "--local_save_dir", str(tmp_path / "out"), "--source", source)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["test.parquet"]
    (problem,) = load_problems(str(tmp_path / "out"))
    assert (problem.task, problem.gold) == ("aime24", "25")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("latest", "train"),
        ("contest_2", "train"),
        ("dapo-train-00000-of-00001", "train"),
        ("Test2", "test"),
        ("testset", "test"),
        ("training", "train"),
    ],
)
def test_a_whole_word_of_a_files_name_says_its_split(tmp_path, name, split):
    source = write(tmp_path / f"{name}.jsonl", [dapo_row("Find 1.", "1")])
    assert run("dapo-math", "--local_save_dir", str(tmp_path / "out"), "--source", source) == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == [f"{split}.parquet"]


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match=r"nothere\.jsonl: no such file or folder"):  # whatever its name does not say
        run("gsm8k", "--local_save_dir", str(tmp_path), "--source", str(tmp_path / "nothere.jsonl"))
    unnamed = write(tmp_path / "rows.jsonl", [gsm8k_row(1)])
    with pytest.raises(UserError, match="the name must say train or test"):
        run("gsm8k", "--local_save_dir", str(tmp_path), "--source", unnamed)
    with pytest.raises(UserError, match="the name must say train or test"):
        run("gsm8k", "--local_save_dir", str(tmp_path), "--source", write(tmp_path / "contest.jsonl", [gsm8k_row(1)]))
    (tmp_path / "contest.jsonl").unlink()
    with pytest.raises(UserError, match="no file of split 'train'; splits there: rows"):
        run("gsm8k", "--local_save_dir", str(tmp_path), "--source", str(tmp_path))
    with pytest.raises(UserError, match="unknown task 'gsm'"):
        run("gsm", "--local_save_dir", str(tmp_path))
    with pytest.raises(UserError, match="local_save_dir"):
        run("gsm8k")


@pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not there")
def test_real_data(tmp_path, capsys):
    run("gsm8k", "--local_save_dir", str(tmp_path / "gsm8k"), "--source", str(SHARED / "gsm8k"))
    assert len(load_problems(str(tmp_path / "gsm8k"), "train")) == 7473
    assert len(load_problems(str(tmp_path / "gsm8k"), "test")) == 1319
    files = [str(SHARED / "dapo_math" / name) for name in ("processed_en_2000.jsonl", "original_1000.jsonl")]
    run("dapo-math", "--local_save_dir", str(tmp_path / "dapo"), "--source", *files)
    total = sum(len(load_problems(str(tmp_path / "dapo"), split)) for split in ("train", "test"))
    out = capsys.readouterr().out
    dropped = int(out.split(" exact repeats")[0].rsplit(" ", 1)[1])
    assert total + dropped == 3000
    assert out.count("0 golds do not pass their own verifier") == 4


def test_svamp_is_graded_by_its_name_after_preparation(tmp_path):
    if not (SHARED / "svamp").is_dir():
        pytest.skip("needs ../shared/data/svamp")
    assert run("svamp", "--local_save_dir", str(tmp_path), "--source", str(SHARED / "svamp")) == 0
    train = load_problems(str(tmp_path), "train")
    assert (len(train), {problem.task for problem in train}, train[0].gold) == (700, {"svamp"}, "51")
    test = load_problems(str(tmp_path), "test")
    assert (len(test), {problem.task for problem in test}, test[0].gold) == (300, {"svamp"}, "9")
    assert build_messages(train[0], TASKS["svamp"].style)[-1]["content"].endswith('final answer after "####".')


def test_verls_older_name_of_the_folder(tmp_path):
    source = write(tmp_path / "train.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    assert run("gsm8k", "--local_dir", str(tmp_path / "out"), "--source", source) == 0
    assert (tmp_path / "out" / "train.parquet").is_file()
