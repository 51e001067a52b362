"""report.html: one file, no network, from a result folder.

Formulas are typeset in the reader's browser by Temml, which is part of the page: of the 19,174 formulas in the problems
and solutions of MATH-500, AIME, AMC and 2,300 rows of DAPO-Math it refuses 3, which then show as source, whereas
latex2mathml refuses none, prints commands it does not know as words, and makes the text 15 times longer.

Model output is untrusted. It enters the page as compressed data, reaches the document by textContent only, and a
content security policy admits no script but the page's own (by hash) and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from perl.errors import UserError
from perl.reports import embed, figures
from perl.reports.results import Run, read_runs
from perl.results import Summary, atomic_write

SCRIPTS = ("temml.min.js", "formulas.js", "samples.js", "page.js")
NAME = "report.html"


def write_report(result_dir: Path, output: Path | None = None) -> Path:
    """Write the report of what lies in `result_dir`; return its path, `result_dir`/report.html unless given.

    Raises:
        UserError: no results there, or `output` cannot be written.
    """
    output = output or result_dir / NAME
    html = render(read_runs(result_dir))
    try:
        with atomic_write(output, errors="backslashreplace") as file:
            file.write(html)
    except OSError as error:
        raise UserError(f"{output}: {error.strerror}; write another file after --output") from error
    return output


def render(runs: Sequence[Run]) -> str:
    """The page of one run, or of the checkpoints of a sweep."""
    scripts, style = [asset(name) for name in SCRIPTS], asset("report.css")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perl.reports", "static"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": lambda share: f"{100 * share:.1f} %",
        "points": lambda share: f"{100 * share:+.2f}".replace("-", "−"),
        "count": lambda number: f"{number:,.0f}",
    }
    return environment.get_template("report.html.j2").render(
        title=heading(runs),
        runs=runs,
        sweep=bool(runs[0].label),
        policy=policy(scripts, style),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        figures=figures,
        comparisons=comparisons(runs),
        settings=[settings(runs, name) for name in figures.dataset_names(runs)],
        meta=embed.json_for_html(meta(runs)),
        pieces=embed.pieces(runs),
    )


def asset(name: str) -> str:
    return resources.files("perl.reports").joinpath("static", name).read_text(encoding="utf-8")


def policy(scripts: Sequence[str], style: str) -> str:
    """The content security policy: these scripts and this style, nothing else, nothing from anywhere. Style attributes
    stay allowed, as typeset formulas have some; with no source to load from, they can only move and colour things."""

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(digest, scripts))}",
            f"style-src-elem {digest(style)}",
            "style-src-attr 'unsafe-inline'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def heading(runs: Sequence[Run]) -> str:
    summaries = [scored.summary for run in runs for scored in run.scored]
    models = " and ".join(dict.fromkeys(Path(summary["model"]).name or summary["model"] for summary in summaries))
    if runs[0].label:
        return f"{models}, sweep of {len(runs)}"
    adapters = dict.fromkeys(adapter_name(summary["adapter"]) for summary in summaries if summary["adapter"])
    return " with ".join([models, *adapters])


def adapter_name(adapter: str) -> str:
    """`run` for outputs/run/adapter, as every run has one of that name; run/checkpoint-10 for one of its folders."""
    *_, parent, last = ("", *Path(adapter).parts)
    if last == "adapter":
        return parent or last
    return f"{parent}/{last}" if last.startswith("checkpoint-") and parent else last


def meta(runs: Sequence[Run]) -> dict[str, Any]:
    """What samples.js needs before the first piece arrives."""
    datasets: dict[str, dict[str, int]] = {}
    for run in runs:
        for scored in run.scored:
            if scored.dataset not in datasets:
                head, tail = embed.shared_ends(scored)
                datasets[scored.dataset] = {"head": head, "tail": tail}
    return {
        "datasets": datasets,
        "runs": [run.label for run in runs],
        "samples": sum(len(scored.records) for run in runs for scored in run.scored),
        "compared": any(run.comparison for run in runs),
    }


def comparisons(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A section for each evaluation that runs were compared with: its name and folder, those runs, the charts, and what
    besides the model differs, by (name, there, here), where several runs were compared as each of them says."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.comparison:
            groups.setdefault(run.comparison.folder, []).append(run)
    made = []
    for folder, compared in groups.items():
        found = [run.comparison for run in compared if run.comparison]
        names = [Path(found[0].model or folder).name, *([adapter_name(found[0].adapter)] if found[0].adapter else [])]
        made.append(
            {
                "title": " with ".join(names),
                "folder": folder,
                "runs": compared,
                "figures": figures.of_comparisons(compared),
                "same": [run.label or "both" for run in compared if run.comparison and run.comparison.same_model],
                "differs": list(dict.fromkeys(row for comparison in found for row in comparison.differs)),
            }
        )
    return made


def settings(runs: Sequence[Run], dataset: str) -> dict[str, Any]:
    """What a dataset's numbers were made with, as (name, value) rows and longer texts. What differs between the runs of
    a sweep is told for each."""
    summaries = [(run.label, scored.summary) for run in runs for scored in run.scored if scored.dataset == dataset]
    each = [(label, settings_of(summary)) for label, summary in summaries]
    rows = {}
    for name in each[0][1]:
        values = {label: found[name] for label, found in each if found[name] is not None}
        if len(set(values.values())) > 1:
            rows[name] = "\n".join(f"{label}: {value}" for label, value in values.items())
        elif values:
            rows[name] = next(iter(values.values()))
    return {"dataset": dataset, "rows": rows, "texts": texts_of(summaries[0][1])}


def settings_of(summary: Summary) -> dict[str, Any]:
    """None for what does not apply."""
    made = summary["provenance"]
    return {
        "model": summary["model"],
        "base hash": summary["base_hash"],
        "adapter": summary["adapter"],
        "adapter hash": summary["adapter_hash"],
        "adapter mode": summary["adapter_mode"] if summary["adapter"] else None,
        "dtype": summary["dtype"],
        "longest context": summary["max_model_len"],
        "dataset": summary["dataset"],
        "graded as": ", ".join(summary["tasks"]),
        "sampling": ", ".join(f"{name} {value}" for name, value in {"n": summary["n"], **summary["sampling"]}.items()),
        "engine": ", ".join(summary["engines"]),
        "command": shlex.join(made["command"]),
        "folder": made["folder"],
        "commit": made["git_commit"],
        "versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        "machine": made["machine"],
        "chat template hash": summary["chat_template_hash"],
    }


def texts_of(summary: Summary) -> dict[str, str]:
    """The prompts' wording, by what it is."""
    texts = {}
    for task, style in summary["styles"].items():
        texts[f"Template of {task}"] = style["template"]
        if style["system_prompt"] is not None:
            texts[f"System prompt of {task}"] = style["system_prompt"]
        if style["few_shot"]:
            texts[f"Worked examples of {task}"] = "\n\n".join(f"{q}\n→ {a}" for q, a in style["few_shot"])
    texts["Chat template"] = summary["chat_template"] or ""
    return texts
