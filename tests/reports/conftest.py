"""Result folders made by hand, and a headless Chromium that notes every request and every line on its console."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from perl.tasks import TASKS
from tests.results import record, summary

__all__ = ["record"]

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1300,900",
)  # fmt: skip


def write_results(folder: Path, records: Sequence[dict[str, Any]], n: int = 1, **changes: Any) -> None:
    """samples.jsonl and summary.json of a dataset."""
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    style = {"styles": {"gsm8k": asdict(TASKS["gsm8k"].style)}}
    (folder / "summary.json").write_text(json.dumps(summary(list(records), n, **style | changes)), encoding="utf-8")


CONFIG = {
    "common": {"seed": 3},
    "model": {"model_name_or_path": "models/tiny"},
    "dataset": {"dataset_name_or_path": "gsm8k"},
    "peft": {"type": "dora", "r": 8, "target_modules": ["q_proj", "v_proj"]},
    "reward": {"functions": ["accuracy"], "weights": None},
    "noise_injection": {"enabled": True, "sigma_start": 0.05, "warmup_stage": False},
    "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4},
}


def write_training(
    folder: Path, rows: Sequence[dict[str, Any]], config: dict[str, Any] | None = None, **environment: Any
) -> None:
    """A run's metrics.jsonl, config.yaml (CONFIG unless given) and environment.json."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG if config is None else config), encoding="utf-8")
    made = {"command": ["perl/train.py", "--recipe", "my own.yaml"], "device": "npu", "num_processes": 3} | environment
    (folder / "environment.json").write_text(json.dumps(made), encoding="utf-8")


def logged(step: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl, with each metric that the page shows."""
    made = {
        "step": step, "time": 1000.0 + step, "reward": 0.5, "completions/mean_length": 100.0,
        "completions/clipped_ratio": 0.25, "entropy": 0.4, "aqn/sigma": 0.05, "aqn/sigma_realized": 0.049,
        "timing/step": 2.0, "timing/rollout": 1.25, "timing/update": 0.5, "rollout/logp_mismatch": 0.001,
        "grad_norm": 0.1, "perf/throughput": 900.0, "rewards/accuracy/mean": 0.5,
    }  # fmt: skip
    return made | changes


@pytest.fixture(scope="session")
def chrome(tmp_path_factory) -> Iterator[Any]:
    """A selenium driver; its log "performance" holds the requests, "browser" the console."""
    webdriver = pytest.importorskip("selenium.webdriver")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no chromium with its chromedriver here; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def visit(chrome) -> Callable[[Path], Page]:
    return lambda file: Page(chrome, file)


class Page:
    """An open report."""

    def __init__(self, chrome: Any, file: Path):
        self.chrome = chrome
        chrome.get("about:blank")
        chrome.get_log("performance"), chrome.get_log("browser")
        chrome.get(file.as_uri())
        self.until("!/oading/.test(document.getElementById('count')?.textContent)")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.chrome.execute_script(script, *arguments)

    def until(self, condition: str, seconds: float = 10) -> None:
        """Wait in the page until the JavaScript `condition` holds."""
        script = f"""const done = arguments[1], end = performance.now() + 1000 * arguments[0];
            const look = () => {condition} ? done(true) : performance.now() > end ? done(false) : setTimeout(look, 5);
            look();"""
        assert self.chrome.execute_async_script(script, seconds), condition

    def requests(self) -> dict[str, str]:
        """Address of everything that was asked for since the page was opened, the page itself among them -> why it was
        refused, empty for what was let out."""
        events = [json.loads(entry["message"])["message"] for entry in self.chrome.get_log("performance")]
        asked = {e["params"]["requestId"]: e["params"] for e in events if e["method"] == "Network.requestWillBeSent"}
        failed = {e["params"]["requestId"]: e["params"] for e in events if e["method"] == "Network.loadingFailed"}
        return {p["request"]["url"]: failed.get(i, {}).get("blockedReason", "") for i, p in asked.items()}

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.chrome.get_log("browser")]

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def shown(self) -> int:
        """How many samples the page says that it shows."""
        return int(self.text("#count").split(" of ")[0].replace(",", ""))

    def click(self, selector: str) -> None:
        """Click, and wait until the list follows."""
        self.run("document.querySelector(arguments[0]).click()", selector)
        self.settle()

    def enter(self, selector: str, value: str) -> None:
        element = self.chrome.find_element("css selector", selector)
        if element.tag_name == "input":
            element.clear()
            element.send_keys(value or " \ue003")  # emptying alone is no input event
        else:
            self.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input',"
                     "{bubbles: true}))", element, value)  # fmt: skip
        self.settle()

    def settle(self) -> None:
        """Filters wait 120 ms for more typing, formulas a frame."""
        self.chrome.execute_async_script("setTimeout(arguments[0], 180)")
