import json

import pytest

from perl.base.errors import UserError
from perl.evaluation.store import Store, differences, locked
from tests.results import record

IDENTITY = {"base_hash": "b1", "sampling": {"temperature": 1.0, "top_p": 1.0}}


def line(key: str) -> str:
    return json.dumps(record(key), ensure_ascii=False) + "\n"


def test_rows_come_back(tmp_path):
    store = Store(tmp_path, IDENTITY)
    store.append([record("a"), record("a", 1)])
    store.append([record("b", completion="π\n")])
    again = Store(tmp_path, IDENTITY)
    assert list(again.records) == [("a", 0), ("a", 1), ("b", 0)]
    assert again.records["b", 0]["completion"] == "π\n"
    assert ("a", 1) in again
    assert ("b", 1) not in again


@pytest.mark.parametrize("torn", ['{"key": "c", "sam', '{"key": "c", "sample": 0}', "\x00\x00"])
def test_a_torn_last_line_is_pending_again(tmp_path, torn, caplog):
    Store(tmp_path, IDENTITY).append([record("a"), record("b")])
    whole = (tmp_path / "samples.jsonl").read_bytes()
    (tmp_path / "samples.jsonl").write_bytes(whole + torn.encode())
    store = Store(tmp_path, IDENTITY)
    assert list(store.records) == [("a", 0), ("b", 0)]
    assert "1 broken line" in caplog.text
    store.append([record("c")])
    assert (tmp_path / "samples.jsonl").read_bytes() == whole + line("c").encode()


def test_a_line_broken_in_the_middle_is_pending_again(tmp_path):
    (tmp_path / "samples.jsonl").write_text(line("a") + '{"key": \n' + line("b"))
    assert list(Store(tmp_path, IDENTITY).records) == [("a", 0), ("b", 0)]


def test_other_sampling_is_refused_with_the_difference(tmp_path):
    Store(tmp_path, IDENTITY)
    changed = {"base_hash": "b1", "sampling": {"temperature": 0.6, "top_p": 1.0}}
    with pytest.raises(UserError, match=r"sampling\.temperature was 1\.0, is 0\.6"):
        Store(tmp_path, changed)
    assert json.loads((tmp_path / "run.json").read_text()) == IDENTITY


def test_differences_name_the_leaf():
    before = {"a": 1, "b": {"c": [1, 2], "d": 0}}
    assert differences(before, {"a": 1, "b": {"c": [1, 3], "e": 5}}) == [
        ("b.c", [1, 2], [1, 3]),
        ("b.d", 0, None),
        ("b.e", None, 5),
    ]
    assert differences(before, before) == []


def test_two_evaluations_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match="another evaluation"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_one_line_and_overwrites_nothing(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "_lock").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match=r"_lock is a link; delete it"), locked(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_file_in_the_place_of_a_datasets_folder_is_one_line(tmp_path):
    (tmp_path / "gsm8k").touch()
    with pytest.raises(UserError, match=r"^--result_dir: .*/gsm8k: File exists; remove it, or name another folder$"):
        Store(tmp_path / "gsm8k", IDENTITY)


def test_a_full_disk_is_one_line(tmp_path):
    store = Store(tmp_path, IDENTITY)
    store.path = type(store.path)("/dev/full")
    with pytest.raises(UserError, match="No space left"):
        store.append([record("a")])
    assert ("a", 0) not in store


def test_half_of_a_surrogate_pair_ends_no_evaluation(tmp_path):
    Store(tmp_path, {}).append([record("a", completion="\ud800")])
    assert Store(tmp_path, {}).records["a", 0]["completion"] == "\ud800"


def test_a_failed_row_stays_until_it_is_completed_and_is_written_once(tmp_path):
    store = Store(tmp_path, {})
    failed = record("a-0", 0, error="it killed its worker twice, alone", score=0.0)
    store.append([failed, record("b-0", 0)])
    store.append([failed])
    assert len(store.path.read_text().splitlines()) == 2
    store.append([record("a-0", 0)])
    store.append([failed, record("a-0", 0, score=0.5)])  # neither takes the place of what was completed
    for kept in (store.records, Store(tmp_path, {}).records):
        assert [(key, row["error"], row["score"]) for (key, _), row in kept.items()] == [
            ("a-0", None, 1.0),
            ("b-0", None, 1.0),
        ]
