"""Where a training stands, read from its folder."""

import json
import os
import re

import pytest

from perl.__main__ import main
from perl.base.errors import UserError
from perl.base.files import LOCK, lock_now, open_lock


def test_it_says_who_works_what_was_logged_and_what_each_worker_said_last(tmp_path, capsys):
    rows = [
        {"step": 6, "time": 100.0, "loss": 0.1, "reward": 0.2},
        {"step": 7, "time": 130.0, "loss": 0.1, "reward": 0.25, "pool/trainer_waited": 0.12, "pool/workers_idle": 0.5,
         "pool/staleness": 1.5, "pool/staleness_max": 2.0, "rollout/engine_mismatch": 2e-7, "pool/queue": 3.0,
         "pool/tokens_per_s": 90.0, "pool/tokens_per_s_min": 31.0, "pool/tokens_per_s_max": 62.0},
        {"step": 8, "time": 130.0, "loss": 0.1, "rollout/logp_kl": 1e-3},
        {"step": 8, "time": 131.0, "val-core/gsm8k/acc/mean@1": 0.5},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5}')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("loading\nready\n")
    (tmp_path / "logs" / "worker-1.log").write_text("")
    with open_lock(tmp_path / LOCK) as lock:
        lock_now(lock)
        assert main(["status", str(tmp_path)]) == 0
    said = re.sub(r"\d+:\d\d:\d\d ago", "LONG ago", capsys.readouterr().out).splitlines()
    assert said == [
        f"{tmp_path}: process {os.getpid()} works in it",
        "step 8, LONG ago  loss 0.1000",
        "step 7  mean staleness 1.50  engine mismatch 2.0e-07 nats  queue 3  workers 90 tok/s  slowest 31  fastest 62",
        "checkpoint-5, LONG ago",
        "worker-0, LONG ago: ready",
        "worker-1, LONG ago: has said nothing",
    ]
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: no process of this machine works in it\n")


def test_a_run_has_ended_where_its_result_is(tmp_path, capsys):
    """One that a signal has stopped logs its time too."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.2}\n{"step": 1, "train_runtime": 2.0}\n')
    nobody = f"{tmp_path}: no process of this machine works in it"
    for result, said in ((None, "it was stopped: --config.training.resume_from_checkpoint auto goes on"),
                         ("adapter", "it has ended")):  # fmt: skip
        if result:
            (tmp_path / result).mkdir()
        assert main(["status", str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"{nobody}, {said}"


@pytest.mark.parametrize(("name", "said"), [("empty", "no training has begun there"), ("nothing", "no such folder")])
def test_another_folder_is_refused_in_one_line(tmp_path, name, said):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"^RUN .*{name}: {said}; give the training.output_dir"):
        main(["status", str(tmp_path / name)])
