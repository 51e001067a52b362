"""What one process cannot write ends all of them at once, in one line."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

WRITES = """
from pathlib import Path
from types import SimpleNamespace

from accelerate import PartialState
from perl.base.errors import RunError, report_errors
from perl.runs.callbacks import MetricsWriter
from perl.runs.together import failing_together

state = PartialState(cpu=True)
first = state.process_index == 0
args = SimpleNamespace(device=state.device)
logged = SimpleNamespace(global_step=1, is_world_process_zero=first, log_history=[])
MetricsWriter(Path("metrics.jsonl")).on_log(args, logged, None, logs={"loss": 0.5})
try:
    MetricsWriter(Path("/dev/full")).on_log(args, logged, None, logs={"loss": 0.5})
except RunError as error:
    Path(f"rank{state.process_index}").write_text(str(error))
with report_errors():
    with failing_together("validation: what it leaves"):
        if first:
            Path("/dev/full").write_text("x")
    state.wait_for_everyone()
    print("went on")
"""


def test_what_rank_0_cannot_write_ends_all_processes_at_once(tmp_path):
    """Else the others wait in the next collective for as long as its timeout is."""
    (tmp_path / "writes.py").write_text(WRITES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "writes.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "went on" not in done.stdout
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert said == "error: validation: what it leaves cannot be written: [Errno 28] No space left on device"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text() == "/dev/full cannot be written: No space left on device"
