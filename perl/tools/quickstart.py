"""The quickstart: score the base model, train an adapter with GRPO and AQN, score again, side by side.

perl/eval.py  ->  accelerate launch -m perl.train  ->  perl/eval.py --adapter  ->  python -m perl report
->  table, the path of the report, and JSON as the last line
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perl.base.errors import report_errors
from perl.base.paths import user_path
from perl.config.parser import Parser
from perl.config.types import NonNegativeInt
from perl.records import Sampling
from perl.tools.stages import ROOT, Engine, Evaluation, Scores, StageError, Where, alone, evaluate, report, say, train

BASE_FOLDER, DATA_FOLDER = ROOT / "assets" / "quickstart-base", ROOT / "assets" / "quickstart-data"
"""Made by benchmarks/quickstart_base.py and benchmarks/quickstart_problems.py."""
HELD_OUT = DATA_FOLDER / "test.jsonl"
RECIPE = ROOT / "recipes" / "quickstart.yaml"
MAX_NEW_TOKENS = 24
"""The longest right answer has 16 tokens."""
SAMPLED = Sampling(n=8, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS)
GREEDY = Sampling(n=1, temperature=0.0, max_new_tokens=MAX_NEW_TOKENS)


def quickstart(seed: int, engine: Engine, folder: Path, console: Console, where: Where) -> dict[str, float | int]:
    """Run the stages and show the table; returns what the JSON line holds. `folder` gets everything."""
    started = time.monotonic()
    console.print(f"[1/4] score the base model on held-out problems, {SAMPLED.n} samples each and greedily")
    how = Evaluation(model=BASE_FOLDER, held_out=HELD_OUT, sampled=SAMPLED, greedy=GREEDY, engine=engine, seed=seed)
    before = evaluate(how, folder / "before", console, where=where)
    console.print("[2/4] train a LoRA adapter with GRPO and AQN (recipes/quickstart.yaml)")
    adapter = train("perl.train", RECIPE, ["--config.common.seed", str(seed)], folder / "train", console, where)
    console.print("[3/4] score the base model with the adapter, on the same problems")
    after = evaluate(how, folder / "after", console, adapter, where)
    console.print("[4/4] write the report (python -m perl report)")
    page = report([folder], folder / "report.html")
    console.print(comparison(before, after))
    say(console, f"report: {page}")
    return {
        "before": round(before.sampled.value, 4),
        "after": round(after.sampled.value, 4),
        "greedy_before": round(before.greedy.value, 4),
        "greedy_after": round(after.greedy.value, 4),
        "seed": seed,
        "wall_s": round(time.monotonic() - started, 1),
    }


def comparison(before: Scores, after: Scores) -> Table:
    table = Table(title=escape("Accuracy on held-out problems in %  [95 % confidence interval]"))
    for heading in ("", "before", "after", "points"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, old, new in (
        (f"avg@{SAMPLED.n}, temperature 1", before.sampled, after.sampled),
        ("greedy", before.greedy, after.greedy),
    ):
        table.add_row(name, escape(str(old)), escape(str(new)), f"{100 * (new.value - old.value):+.1f}")
    return table


def main() -> int:
    parser = Parser(prog="python -m perl.tools.quickstart", description="Train and evaluate a tiny model.")
    parser.add_argument("--seed", type=NonNegativeInt, default=1, help="of training and evaluation")
    parser.add_argument("--engine", type=Engine, default="hf", help="what evaluates: transformers or vLLM")
    parser.add_argument("--output_dir", type=str, default=None, help="default: outputs/quickstart_<seed>_<date>")
    with report_errors():
        args = parser.parse_args()
        default = ROOT / "outputs" / f"quickstart_{args.seed}_{time.strftime('%Y%m%d_%H%M%S')}"
        folder = user_path(args.output_dir).absolute() if args.output_dir else default
        console = Console()
        say(console, f"everything goes to {folder}")
        try:
            with alone(folder, "--output_dir", console) as kept_open:
                result = quickstart(int(args.seed), args.engine, folder, console, Where(kept_open=(kept_open,)))
        except StageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        line = json.dumps(result)
        (folder / "result.json").write_text(line + "\n", encoding="utf-8")
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
