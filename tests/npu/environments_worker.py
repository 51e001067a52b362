"""One rank of trainings whose model calls a tool, one after the other in this process:
python -m tests.npu.environments_worker OUT_FOLDER PLACE SETTINGS.

PLACE is of tests.environments.working.make_place, SETTINGS is JSON with fields that differ. Trains alone and from its
first checkpoint, both with two workers too, and alone where no environment of the second rank begins. Leaves
OUT_FOLDER/rank<N>.json: of each training the conversations of this rank and the log; OUT_FOLDER/<name>: what it has
trained.
"""

import json
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState

from tests.environments.working import conversations_of, train
from tests.ranks import leave

LOGGED = ("loss", "turns/mean", "tools/call_frequency", "tools/failure_frequency", "environment/failure_frequency",
          "rollout/logp_mismatch", "rollout/engine_mismatch")  # fmt: skip


def main() -> None:
    out, place, settings = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    alone = {"rollout": {"piece_size": None}}
    by_workers = {"rollout": {"workers": 2, "lag": 1}, "noise": None}  # without noise nothing drops what FSDP2 gathers
    found: dict[str, Any] = {}
    for name, how, checkpoint in [
        ("alone", alone, None),
        ("alone_resumed", alone, "alone/run/checkpoint-1"),
        ("workers", by_workers, None),
        ("workers_resumed", by_workers, "workers/run/checkpoint-1"),
    ]:
        folder, resume = out / name.removesuffix("_resumed") / "run", checkpoint and str(out / checkpoint)
        _, batches, logged = train(place, folder, resume, saved=out / name, **saving, **how, **settings)
        rows = {f"{row[0]}-{row[1]}": row for row in conversations_of(batches)}
        found[name] = {"rows": rows, "logged": [{key: row[key] for key in LOGGED if key in row} for row in logged]}
    environment = {"factory": f"{place}/tools.py:OfFirstRank"}
    _, batches, logged = train(place, out / "first_rank", environment=environment, **alone, max_steps=1, **settings)
    found["first_rank"] = {
        "failed": [row.failure is not None for batch in batches for row in batch.rows],
        "turns": [row.turns for batch in batches for row in batch.rows],
        "logged": [row["environment/failure_frequency"] for row in logged],
    }
    leave(out, PartialState().process_index, {"device": str(PartialState().device), "runs": found})


if __name__ == "__main__":
    main()
