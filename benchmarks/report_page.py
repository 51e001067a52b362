"""How soon the page of a run can be read: seconds until headless Chromium has loaded and drawn it.

    python -m benchmarks.report_page [--steps 2000] [--loads 7] [--run DIR]

The metrics are drawn by chance, as many steps as are asked for; with --run the evaluations and the settings of that
folder (of a `make quickstart`) are on the page too. The last line is JSON: megabytes, seconds to write the page, and
to open it (median and slowest), from the request until everything is loaded and a frame is drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perl.base.errors import UserError, report_errors
from perl.reports.page import NAME, write_page
from perl.reports.sources import read_material
from perl.tools.report import compared

LOADED = """const done = arguments[0];
const look = () => /oading/.test(document.getElementById('count')?.textContent ?? '') ? setTimeout(look, 5)
    : requestAnimationFrame(() => setTimeout(done));
look();"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_page", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--run", help="folder whose evaluations and settings are on the page too")
    return parser


def metrics(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    """What a step logs, about as a run does."""
    done = step / steps
    return {
        "step": step, "reward": 0.9 - 0.4 * math.exp(-3 * done) + rng.gauss(0, 0.05),
        "completions/mean_length": 300 + 200 * done + rng.gauss(0, 30), "completions/clipped_ratio": 0.1 * (1 - done),
        "entropy": 0.5 - 0.3 * done + rng.gauss(0, 0.02), "aqn/sigma": 0.05 * (1 - done),
        "aqn/sigma_realized": 0.05 * (1 - done) + rng.gauss(0, 0.001), "timing/step": 20 + rng.gauss(0, 2),
        "timing/rollout": 12 + rng.gauss(0, 1), "timing/update": 7 + rng.gauss(0, 1),
        "rollout/logp_mismatch": abs(rng.gauss(0.002, 0.001)), "grad_norm": abs(rng.gauss(0.2, 0.1)),
        "perf/throughput": 2000 + rng.gauss(0, 100),
    }  # fmt: skip


def make_run(folder: Path, steps: int, like: Path | None) -> None:
    rng = random.Random(0)
    lines = [json.dumps(metrics(step, steps, rng)) + "\n" for step in range(1, steps + 1)]
    if like:
        shutil.copytree(like, folder, ignore=shutil.ignore_patterns("checkpoint-*", "*.safetensors", NAME))
    train = next((found.parent for found in folder.glob("**/metrics.jsonl")), folder / "train")
    train.mkdir(parents=True, exist_ok=True)
    (train / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def open_times(page: Path, loads: int, profile: str) -> list[float]:
    """Seconds of each load."""
    from selenium import webdriver

    binary, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not binary or not driver:
        raise UserError("no chromium with its chromedriver here; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900", f"--user-data-dir={profile}")
    for flag in flags:
        options.add_argument(flag)
    seconds = []
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as browser:
        for _ in range(loads):
            browser.get("about:blank")
            began = time.monotonic()
            browser.get(page.as_uri())
            browser.execute_async_script(LOADED)
            seconds.append(time.monotonic() - began)
    return seconds


def main() -> int:
    args = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        make_run(folder, args.steps, Path(args.run).expanduser() if args.run else None)
        began = time.monotonic()
        page = write_page(compared(read_material([folder])), folder / NAME)
        written = time.monotonic() - began
        size = page.stat().st_size
        seconds = open_times(page, args.loads, str(Path(temporary) / "profile"))
    found = {
        "steps": args.steps,
        "megabytes": round(size / 1e6, 2),
        "written_s": round(written, 2),
        "open_s": round(statistics.median(seconds), 2),
        "open_slowest_s": round(max(seconds), 2),
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    with report_errors():
        sys.exit(main())
