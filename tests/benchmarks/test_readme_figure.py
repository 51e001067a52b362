"""The README's figure."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.readme_figure import write_figure
from perl.base.errors import UserError
from perl.reports.sources import read_material
from perl.tools.report import compared
from perl.tools.stages import ROOT
from tests.reports.conftest import logged, record, write_results, write_training


def recorded_run(folder: Path) -> Path:
    """What the committed figures show of a `make quickstart`: its rewards, and its scores with their intervals."""
    recorded = json.loads((Path(__file__).parent / "quickstart_run.json").read_text())
    write_training(folder / "train", recorded["metrics"])
    for name, score in recorded["scores"].items():
        adapter = "train/adapter" if name.startswith("after") else None
        sampling = {"temperature": score["temperature"]}
        found = dict.fromkeys(("accuracy", "pass@1", "maj@1"), score["accuracy"])
        write_results(
            folder / name / "test", [record("0-0", s) for s in range(score["n"])], score["n"], metrics=found,
            problems=score["problems"], sampling=sampling, adapter=adapter,
        )  # fmt: skip
    return folder


def test_the_committed_figures_are_what_the_command_draws(tmp_path):
    """Where the drawing changes, `python -m benchmarks.readme_figure RUN_DIR` draws them again."""
    folder = recorded_run(tmp_path / "run")
    command = [sys.executable, "-m", "benchmarks.readme_figure", str(folder)]
    subprocess.run([*command, "--output", str(tmp_path / "quickstart.svg")], cwd=ROOT, timeout=120, check=True)
    for scheme in ("light", "dark"):
        file = f"quickstart_{scheme}.svg"
        assert (tmp_path / file).read_text() == (ROOT / "assets" / file).read_text()


def test_the_figures_need_nothing_from_outside():
    texts = [(ROOT / "assets" / f"quickstart_{scheme}.svg").read_text() for scheme in ("light", "dark")]
    bare = []
    for text in texts:
        assert len(text) < 60_000
        assert not re.search(r"url\(|href|<script|var\(|@import", text)
        svg = ET.fromstring(text)
        style = svg.find("{*}style")
        assert style is not None
        svg.remove(style)
        bare.append(ET.tostring(svg))
    assert bare[0] == bare[1]  # only the colours differ
    assert texts[0] != texts[1]
    words = [element.text for element in ET.fromstring(texts[0]).iter() if element.tag.endswith("text")]
    assert {"Reward", "optimizer step", "Before and after training", "46.7 % (43.2 to 50.1)"} <= set(words)


def test_a_figure_needs_a_training_and_scores(tmp_path):
    write_training(tmp_path / "run", [logged(1)])
    for name, message in (("a.svg", "no scores of an adapter and of its base"), ("a.png", "ends in .svg")):
        with pytest.raises(UserError, match=message):
            write_figure(read_material([tmp_path / "run"]), tmp_path / name)
    with pytest.raises(UserError, match=r"--output .*No such file"):
        write_figure(compared(read_material([recorded_run(tmp_path / "all")])), tmp_path / "no" / "a.svg")
