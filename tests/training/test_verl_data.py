"""A run on what a verl user brings: several parquet files, one of them without answers, and a compute_score."""

import json

import pandas

from tests.training.small_run import small_run

SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, digits=1.0):
    assert data_source == "my/sums" and ground_truth in ("4", None) and extra_info["index"] in (0, 1, 2, 3)
    share = sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
    return {"score": digits * share, "acc": solution_str == ground_truth}
"""


def test_a_verl_users_files_and_reward(tmp_path):
    rows = [
        {
            "data_source": "my/sums",
            "prompt": [{"role": "user", "content": f"What is {i} + 1 ?"}],
            "reward_model": {"style": "rule", "ground_truth": "4" if i < 2 else None},
            "extra_info": {"index": i},
        }
        for i in range(4)
    ]
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pandas.DataFrame(rows[:2]).to_parquet(files[0])
    pandas.DataFrame(rows[2:]).to_parquet(files[1])
    (tmp_path / "score.py").write_text(SCORE)
    folder = small_run(
        tmp_path,
        "run",
        *("--config.dataset.dataset_name_or_path", json.dumps([str(file) for file in files])),
        *("--config.reward.functions", json.dumps([f"{tmp_path}/score.py:compute_score"])),
        *("--config.reward.kwargs", '{"digits": 2.0}'),
    )
    printed = (tmp_path / "run.log").read_text()
    for file in files:
        assert f"{file}: 2 rows are graded by no task: their data_source my/sums is none of ours" in printed
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "reward" in step]
    assert len(steps) == 2
    assert all(step["rewards/compute_score/acc"] == 0.0 for step in steps)
    assert 0.0 < max(step["reward"] for step in steps) <= 2.0
    assert json.loads((folder / "trained_problems.json").read_text())["dataset"] == [str(file) for file in files]
    assert "`a.parquet` (local), `b.parquet` (local)" in (folder / "adapter" / "README.md").read_text()
