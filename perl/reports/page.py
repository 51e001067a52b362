"""report.html: one file, no network, of a training, of evaluations, or of both.

`render` is the main path: a section is a function that gives the template's part of its name.

Formulas are typeset in the reader's browser by Temml, which is part of the page: of the 19,174 formulas in the problems
and solutions of MATH-500, AIME, AMC and 2,300 rows of DAPO-Math it refuses 3, which then show as source, whereas
latex2mathml refuses none, prints commands it does not know as words, and makes the text 15 times longer.

Model output is untrusted. It enters the page as compressed data, reaches the document by textContent only, and a
content security policy admits no script but the page's own (by hash) and no connection at all.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from perl.adapters import title_of as adapter_title
from perl.base.errors import UserError
from perl.base.files import atomic_write
from perl.reports import charts, embed, figures, training_run
from perl.reports.results import Run
from perl.reports.sources import Material, read_material
from perl.reports.training_run import CONFIG, TrainingRun
from perl.scoring.results import Summary

STYLES = ("palette.css", "charts.css", "report.css")
STEPS_SCRIPTS = ("steps.js",)
SAMPLES_SCRIPTS = ("temml.min.js", "formulas.js", "samples.js", "page.js")
NAME = "report.html"


def write_report(folder: Path) -> Path:
    """Write the report of what lies in `folder` there; return its path. A UserError where nothing does."""
    return write_page(read_material([folder]), folder / NAME)


def write_page(material: Material, output: Path) -> Path:
    """Write the page of `material`; return `output`. A UserError where it cannot be written."""
    return write_html(render(material), output)


def write_html(html: str, output: Path) -> Path:
    try:
        with atomic_write(output, errors="backslashreplace") as file:
            file.write(html)
    except OSError as error:
        raise UserError(f"{output}: {error.strerror}; write another file after --output") from error
    return output


def render(material: Material) -> str:
    """The page: a result where scores before and after are there, the training, the scores, the samples, and how all
    of it was made."""
    training, runs = material.training, material.runs
    sections, scripts = [], []
    reward = figures.of_reward(training) if training else None
    result = figures.before_and_after(runs, material.pairs)
    if result:
        sections.append(part("result", figures=[figure for figure in (reward, result) if figure]))
    if training:
        sections.append(training_section(training, None if result else reward))
        scripts += STEPS_SCRIPTS
    if runs:
        overview = figures.overview(runs)
        sections.append(part("scores", runs=runs, label=material.label, overview=overview, figures=figures))
        for number, compared in enumerate(comparisons(material), start=1):
            sections.append(part("compared", compared=compared, number=number, label=material.label))
        sections.append(part("samples", label=material.label))
        scripts += SAMPLES_SCRIPTS
    sections.append(settings_section(material))
    samples = {"meta": meta(material), "pieces": embed.pieces(runs)} if runs else {}
    return document(heading(material), kind(material), sections, scripts, **samples)


def document(title: str, kind: str, sections: Sequence[Markup], scripts: Sequence[str], **samples: Any) -> Markup:
    """A whole page.

    Args:
        scripts: names in static/.
        samples: `meta` and `pieces` for the scripts that show samples.
    """
    texts = [asset(name) for name in scripts]
    style = "".join(asset(name) for name in STYLES)
    return part(
        "report",
        title=title,
        kind=kind,
        policy=policy(texts, style),
        style=Markup(style),
        sections=sections,
        scripts=[Markup(text) for text in texts],
        **{"meta": None, "pieces": None} | samples,
    )


def part(template: str, **content: Any) -> Markup:
    """static/`template`.html.j2 filled in; what is no Markup is escaped."""
    return Markup(templates().get_template(f"{template}.html.j2").render(**content))


@functools.cache
def templates() -> jinja2.Environment:
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
    return environment


def training_section(run: TrainingRun, reward: figures.Figure | None) -> Markup:
    """The run in a few numbers, its metrics over the steps (`reward` first), and their values for the script."""
    others = figures.of_training(run)
    return part(
        "training",
        facts=training_run.facts(run),
        smoothed=charts.window(len(run.steps)),
        figures=[reward, *others] if reward else others,
        steps=embed.columns(figures.shown_lines(run)),
    )


def settings_section(material: Material) -> Markup:
    made = [settings(material.runs, name) for name in figures.dataset_names(material.runs)]
    if run := material.training:
        texts = {CONFIG: (run.folder / CONFIG).read_text(encoding="utf-8")} if run.config else {}
        made.insert(0, {"title": "Training", "rows": training_run.settings(run), "texts": texts})
    return part("made", settings=made)


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


def kind(material: Material) -> str:
    """What the page is of, and, of a training, which folder it shows: every training of a model has the same title."""
    evaluated = "Evaluation" if len(material.runs) == 1 or material.label == "checkpoint" else "Evaluations"
    if not material.training:
        return evaluated
    name = material.folder.resolve().name
    return f"Training and {evaluated.lower()} · {name}" if material.runs else f"Training · {name}"


def heading(material: Material) -> str:
    if run := material.training:
        model, adapter = run.setting("model", "model_name_or_path"), run.setting("peft", "type")
        if not model:
            return run.folder.resolve().name
        method = f" with {adapter_title(adapter)}" if adapter else ""
        noise = " and AQN" if run.setting("noise_injection", "enabled") else ""
        return f"{Path(model).name or model}: {training_run.algorithm(run)}{method}{noise}"
    summaries = [scored.summary for run in material.runs for scored in run.scored]
    models = " and ".join(dict.fromkeys(Path(summary["model"]).name or summary["model"] for summary in summaries))
    if material.label == "checkpoint":
        return f"{models}, sweep of {len(material.runs)}"
    adapters = dict.fromkeys(adapter_name(summary["adapter"]) for summary in summaries if summary["adapter"])
    return " with ".join([models, *adapters])


def adapter_name(adapter: str) -> str:
    """`run` for outputs/run/adapter, as every run has one of that name; run/checkpoint-10 for one of its folders."""
    *_, parent, last = ("", *Path(adapter).parts)
    if last == "adapter":
        return parent or last
    return f"{parent}/{last}" if last.startswith("checkpoint-") and parent else last


def meta(material: Material) -> dict[str, Any]:
    """What samples.js needs before the first piece arrives."""
    runs = material.runs
    return {
        "datasets": figures.dataset_names(runs),
        "runs": [run.label for run in runs],
        "label": material.label,
        "before": [material.pairs.get(index) for index in range(len(runs))],
        "samples": sum(len(scored.records) for run in runs for scored in run.scored),
        "compared": any(run.comparison for run in runs),
    }


def comparisons(material: Material) -> list[dict[str, Any]]:
    """A section for each model that runs were compared with: its name, those runs with what each was compared with, the
    charts, and what besides the model differs, by (name, there, here), where several runs were compared as each of
    them says."""
    groups: dict[tuple[str | None, str | None], list[int]] = {}
    for index, run in enumerate(material.runs):
        if run.comparison:
            other = run.comparison.other
            groups.setdefault((other["model"] or other["folder"], other["adapter"]), []).append(index)
    made = []
    for (model, adapter), places in groups.items():
        compared = [material.runs[index] for index in places]
        names = [Path(str(model)).name, *([adapter_name(adapter)] if adapter else [])]
        made.append(
            {
                "title": " with ".join(names),
                "pairs": "; ".join(dict.fromkeys(pair_in_words(material, index) for index in places)),
                "runs": [(index, material.runs[index]) for index in places],
                "figures": figures.of_comparisons(compared),
                "same": [run.label or "both" for run in compared if run.comparison and run.comparison.same_model],
                "differs": list(
                    dict.fromkeys(row for run in compared if run.comparison for row in run.comparison.rows)
                ),
            }
        )
    return made


def pair_in_words(material: Material, index: int) -> str:
    """What a run was compared with: another one of this page by its label, else a folder."""
    run, before = material.runs[index], material.pairs.get(index)
    assert run.comparison is not None
    if before is None:
        return f"with {run.comparison.other['folder']}"
    return f"{run.label} with {material.runs[before].label}"


def settings(runs: Sequence[Run], dataset: str) -> dict[str, Any]:
    """What a dataset's numbers were made with, as (name, value) rows and longer texts. What differs between the runs of
    a sweep is told for each."""
    summaries = [(run.label, scored.summary) for run in runs for scored in run.scored if scored.dataset == dataset]
    each = [(label, settings_of(summary)) for label, summary in summaries]
    rows = {}
    for name in each[0][1]:
        values = {label: row[name] for label, row in each if row[name] is not None}
        if len(set(values.values())) > 1:
            rows[name] = "\n".join(f"{label}: {value}" for label, value in values.items())
        elif values:
            rows[name] = next(iter(values.values()))
    return {"title": dataset, "rows": rows, "texts": texts_of(summaries[0][1])}


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
        "quantization": summary.get("quantization"),
        "longest context": summary["max_model_len"],
        "dataset": summary["dataset"],
        "graded as": ", ".join(task or "by its environment" for task in summary["tasks"]),
        "sampling": ", ".join(f"{name} {value}" for name, value in {"n": summary["n"], **summary["sampling"]}.items()),
        "environment": in_words(summary.get("environment")),
        "engine": ", ".join(summary["engines"]),
        "command": shlex.join(made["command"]),
        "folder": made["folder"],
        "commit": made["git_commit"],
        "versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        "machine": made["machine"],
        "chat template hash": summary["chat_template_hash"],
        "chat template arguments": json.dumps(given) if (given := summary.get("chat_template_kwargs")) else None,
    }


def in_words(settings: Mapping[str, Any] | None) -> str | None:
    return None if settings is None else ", ".join(f"{name} {value}" for name, value in settings.items() if value)


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
