"""Files of rows: what is read of them, how far, and how a mistake in one is told."""

import itertools
import json

import pyarrow
import pyarrow.parquet
import pytest

from perl.base.errors import UserError
from perl.tasks import load_problems
from perl.tasks.files import find_files, read_rows
from perl.tools.prepare import splits_of


def test_a_split_is_its_file_or_its_shards_in_one_format(tmp_path):
    shards = ["test-00000-of-00002.parquet", "test-00001-of-00002-b42a775f407cee45.parquet"]
    for name in (*shards, "test-hard.parquet", "tests.parquet", "train.jsonl", "train.csv"):
        (tmp_path / name).touch()
    assert find_files(tmp_path, "test") == [tmp_path / name for name in shards]
    assert find_files(tmp_path, "test-hard") == [tmp_path / "test-hard.parquet"]
    with pytest.raises(UserError, match=r": holds train twice, as train\.csv and train\.jsonl; name one of the files"):
        find_files(tmp_path, "train")
    with pytest.raises(UserError, match=r"holds train twice"):
        splits_of(tmp_path)
    (tmp_path / "test.parquet").touch()
    with pytest.raises(UserError, match=rf": holds test twice, as {shards[0]} and test\.parquet; name one"):
        find_files(tmp_path, "test")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["train-00000-of-00002"], r"holds 1 of 2 shards of train: shard 00001-of-00002 is missing"),
        (["train-00001-of-00002"], r"shard 00000-of-00002 is missing"),
        (["train-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"], r"as \S+1\.parquet and \S+2\.parq"),
        (["train-00000-of-00001-01ab", "train-00000-of-00001-89ef"], r"train twice, as \S+01ab\.\S+ and \S+89ef\."),
        (["dev-00000-of-00002"], r"holds 1 of 2 shards of dev"),
    ],
)
def test_shards_are_all_there_each_once(tmp_path, names, says):
    for name in names:
        (tmp_path / f"{name}.parquet").touch()
    with pytest.raises(UserError, match=says):
        find_files(tmp_path, None)


def test_shards_may_be_counted_from_one(tmp_path):
    for number in (1, 2):
        (tmp_path / f"train-0000{number}-of-00002.parquet").touch()
    assert len(find_files(tmp_path, "train")) == 2


def test_a_copy_of_a_repository_is_searched_before_a_file_at_its_root_counts(tmp_path):
    shard = tmp_path / "data" / "train-00000-of-00001.parquet"
    shard.parent.mkdir()
    for file in (shard, tmp_path / "dataset_infos.json", tmp_path / "data" / "dataset_info.json"):
        file.touch()
    assert find_files(tmp_path, "train") == find_files(tmp_path, None) == [shard]
    (tmp_path / "results.json").touch()
    assert find_files(tmp_path, "train") == find_files(tmp_path, None) == [shard]
    shard.rename(shard.with_name("all.parquet"))
    with pytest.raises(UserError, match=r"no file of split 'test'; splits there: all, results$"):
        find_files(tmp_path, None)
    (tmp_path / "results.json").unlink()
    assert find_files(tmp_path, None) == [tmp_path / "data" / "all.parquet"]
    (tmp_path / "data" / "all.parquet").unlink()
    with pytest.raises(UserError, match=r"the folder holds no \.parquet"):
        find_files(tmp_path, None)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_two_columns_of_one_name_are_told(tmp_path, suffix):
    file = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        file.write_text("question,answer,,answer,\na,1,,2,\n")
    else:
        table = pyarrow.table([["a"], ["1"], ["2"]], names=["question", "answer", "answer"])
        pyarrow.parquet.write_table(table, file)
    with pytest.raises(UserError, match=rf"rows\.{suffix}: two columns are called answer; give one of them another"):
        load_problems(str(file))


def test_columns_of_a_csv_without_a_name_count_for_nothing(tmp_path):
    (tmp_path / "rows.csv").write_text("question,answer,,\na,1,,\n")
    (problem,) = load_problems(str(tmp_path / "rows.csv"))
    assert problem.gold == "1"


def rows_of(file):
    return [row for row, _ in read_rows(file)]


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_as_json_reads_it(indent, tmp_path):
    items = [{"a": "x]" * 5, "b": [1, 250, {"c": None}], "d": 12}, {}, {"e": '\\"'}, {"f": 10**20}]
    file = tmp_path / "rows.json"
    for count in range(len(items) + 1):
        file.write_text(" \n" + json.dumps(items[:count], indent=indent) + "\n ")
        assert rows_of(file) == items[:count]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_the_rest_of_a_file_is_not_read(name, tmp_path):
    """What comes behind the rows that are asked for is no data at all, and is not met."""
    rows = [{"question": f"What is {i} + 3 ?", "answer": f"#### {i + 3}"} for i in range(5000)]
    file = tmp_path / name
    broken = b"\xff\xff" + bytes(1 << 20)
    if name == "rows.csv":
        lines = ["question,answer", *(f"{row['question']},{row['answer']}" for row in rows)]
        file.write_bytes("\n".join(lines).encode() + broken)
    else:
        file.write_bytes("\n".join(map(json.dumps, rows)).encode() + broken)
    assert [problem.gold for problem in load_problems(str(file), limit=3)] == ["3", "4", "5"]
    assert len(list(itertools.islice(read_rows(file), 100))) == 100
    with pytest.raises(UserError, match="not readable as UTF-8"):
        rows_of(file)


@pytest.mark.parametrize("text", ['[{"a": 1} {"a": 2}]', '[{"a": 1}', '[{"a": 1},', '[{"a": 1}] x', "[", '[{"a": 12'])
def test_a_broken_array_is_told(text, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(UserError, match="not valid json"):
        rows_of(file)


def test_a_device_is_told_from_a_file_that_is_not_there():
    with pytest.raises(UserError, match=r"^/dev/null: is a device or a pipe; write a file of rows"):
        load_problems("/dev/null")
    with pytest.raises(UserError, match=r"^/dev/nothing: no such file or folder"):
        load_problems("/dev/nothing")


def test_an_array_that_is_no_text_is_told(tmp_path):
    file = tmp_path / "rows.json"
    file.write_bytes(b'[{"a": "\xff"}]')
    with pytest.raises(UserError, match=r"rows\.json: not readable as UTF-8 json"):
        rows_of(file)


def test_the_place_of_a_mistake_in_an_array_is_the_files(tmp_path):
    text = json.dumps([{"a": i, "b": "x" * i} for i in range(40)], indent=1).replace('"a": 30', '"a": nothing')
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        rows_of(file)
    assert str(error.value) == f"{file}: not valid json: {expected.value}"


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        ("jsonl", '{"question": "a", "answer": 1e99999999999999999999999}', ":1: a number whose exponent is too large"),
        ("json", '[{"question": "a", "answer": 1e99999999999999999999999}]', ": a number whose exponent is too large"),
        ("csv", f'prompt,answer\n"[{{""role"": {"9" * 5000}}}]",1', ":1: a number of more than 4300 digits"),
        ("csv", f'prompt,answer\n"{{""a"": {"[" * 50000}",1', ":1: not valid json: brackets nest too deep"),
    ],
)
def test_a_number_or_a_nesting_beyond_what_can_be_read_is_told(suffix, text, message, tmp_path):
    file = tmp_path / f"rows.{suffix}"
    file.write_text(text + "\n")
    with pytest.raises(UserError) as caught:
        load_problems(str(file))
    assert f"rows.{suffix}{message}" in str(caught.value)


def test_a_duration_that_python_has_no_value_for_is_told(tmp_path):
    columns = {"question": ["a"], "answer": ["1"], "took": pyarrow.array([2**62], pyarrow.duration("s"))}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet: not a readable parquet file: "):
        load_problems(str(tmp_path / "rows.parquet"))
