"""Build one HTML page about a run, or about several side by side: it loads nothing and runs no script.

The template escapes every value, because a run folder may come from a stranger.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from forge.report import images
from forge.report.charts import MOST_CHARTS, Panel, panels
from forge.report.markdown import as_html
from forge.report.svg import COLORS, DASHES, STYLE
from forge.runs import compare, wording
from forge.runs.attempts import attempts_of, omitted, shown
from forge.runs.directions import told_once
from forge.runs.folder import RunFolder, as_dict
from forge.runs.group import RunGroup
from forge.runs.summary import group_rows
from forge.spans import goodput
from forge.util.text import format_bytes, short_path
from forge.version import __version__

TOGGLES = "".join(
    f".chart:has(.keys>:nth-child({i + 1})>input:not(:checked)) .s{i}{{display:none}}"
    for i in range(COLORS * len(DASHES))
)
"""A key of a legend that is unchecked hides its curve: the page has no script."""
MOST_TEXTS = 10
MOST_COLUMNS = 4
"""With more runs, each is a row of one table: its hyperparameters, then its results."""


def page(runs: Sequence[RunFolder]) -> str:
    """Render the whole document."""
    several = len(runs) > 1
    labels = [(chr(ord("A") + i) if i < 26 else str(i + 1)) if several else "" for i in range(len(runs))]
    every = panels(dict(zip(labels, runs, strict=True)))
    drawn = [(panel.is_aside, drawing(panel)) for panel in every[:MOST_CHARTS]]
    return template(Path(__file__).with_name("page.html")).render(
        title=f"{len(runs)} {'rows' if any(isinstance(run, RunGroup) for run in runs) else 'runs'}"
        if several
        else title_of(runs[0]),
        chart_style=Markup(STYLE + TOGGLES),
        runs=[describe(run, label) for run, label in zip(runs, labels, strict=True)],
        comparison=comparison(runs, labels) if several else None,
        own_charts=[chart for is_aside, chart in drawn if not is_aside],
        plugin_charts=[chart for is_aside, chart in drawn if is_aside],
        undrawn=len(every) - len(drawn),
        version=__version__,
        now=time.strftime("%Y-%m-%d %H:%M"),
    )


def drawing(panel: Panel) -> dict[str, Any]:
    """Return a chart for the template: its title, the keys of its legend, and the curves."""
    chart = panel.chart()
    entries = [(name, Markup(look)) for name, look in chart.entries()]
    return {"title": panel.title, "entries": entries, "svg": Markup(chart.draw(styled=False))}


def template(file: Path) -> Template:
    """Return a page's template, which escapes every value; it may include the styles of this folder."""
    loader = FileSystemLoader([file.parent, Path(__file__).parent])
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["counted"] = wording.counted
    return jinja.get_template(file.name)


def title_of(run: RunFolder) -> str:
    return f"{run.subject or 'run'} · {run.path.absolute().name}"


def describe(run: RunFolder, label: str) -> dict[str, Any]:
    """Collect the values that the template shows of a run."""
    every = attempts_of(run)
    found, note = pictures(run)
    return {
        "label": label,
        "title": title_of(run),
        "status": run.status,
        "outcome": outcome(run),
        "tiles": tiles(run),
        "metrics": group_rows(run) if isinstance(run, RunGroup) else metrics_rows(run),
        "runs": [describe(each, each.path.name) for each in run.runs] if isinstance(run, RunGroup) else [],
        "pictures": found,
        "pictures_note": note,
        "texts": texts(run),
        "attempts": [
            [number, attempt.started, attempt.update, attempt.command, ", ".join(changed)]
            for number, attempt, changed in (shown(every) if len(every) > 1 else ())
        ],
        "attempts_note": omitted(every),
        "card": card_rows(run, is_only_attempt=len(every) < 2),
        "stack": [[plugin.get("name"), _options(plugin.get("options"))] for plugin in run.stack],
        "costs": cost_rows(run),
        "time": [] if (spent := goodput.spent(run.spans)) is None else spent.rows(),
        "checkpoints": [[c.name, ", ".join(c.marks), format_bytes(c.bytes)] for c in run.checkpoints],
        "recipe": run.recipe_text,
    }


def outcome(run: RunFolder) -> str:
    """Say in one sentence how the run went."""
    if isinstance(run, RunGroup):
        done = f"{wording.counted(run.epochs, 'epoch')}, {wording.counted(run.updates, 'update')}"
        return f"{len(run.members)} runs of {done} each, {wording.duration(run.seconds)} in all: {run.progress}."
    updates = wording.counted(run.updates, "update")
    if run.planned and run.planned != run.updates:
        updates = f"{run.updates:,} of {wording.counted(run.planned, 'update')}"
    done = f"{wording.counted(run.epochs, 'epoch')}, {updates} in {wording.duration(run.seconds)}"
    match run.status:
        case "finished":
            return f"Finished after {wording.ended(done, run.reason)}."
        case "running":
            return f"Still running when this page was made, after {done}."
        case "interrupted" | "failed":
            return f"{run.status.capitalize()} after {done}: {run.reason}"
        case "killed":
            return f"Ended without a record after {done}, as a killed process does."
    return f"{done}; whether it still runs cannot be determined here."


def tiles(run: RunFolder) -> dict[str, str]:
    """Return the figures at the top of the page, by label."""
    best, spent = list(compare.bests(run).items())[:2], goodput.spent(run.spans)
    return {
        **{f"best {name}": wording.number(value) for name, (_, value) in best},
        "updates": f"{run.updates:,}",
        "epochs": f"{run.epochs:,}",
        "time": wording.duration(run.seconds),
        "of the time in updates (goodput)": "" if spent is None else f"{spent.share:.0%}",
        "samples per second, overall": f"{run.rate:,.0f}" if run.rate else "",
        "parameters": wording.count(as_dict(run.card.get("task")).get("parameters")),
        "device": str(run.card.get("device") or ""),
    }


def metrics_rows(run: RunFolder) -> list[list[Any]]:
    """Return (name, last value, best value, its update) of every metric."""
    best = {name: [wording.number(value), update] for name, (update, value) in compare.bests(run).items()}
    last = told_once({name: run.final[name] for name in compare.metrics_of(run)})
    return [[name, wording.number(value), *best.get(name, ["", ""])] for name, value in last.items()]


def pictures(run: RunFolder) -> tuple[list[images.Picture], str]:
    """Return the last picture of every name in the run's TensorBoard files, and a note about those not shown."""
    folder = run.path / "tensorboard"
    if folder.is_symlink() or not folder.is_dir():
        return [], ""
    try:
        every = images.pictures(folder)
    except ImportError:
        return [], "To show pictures here, install TensorBoard: pip install tensorboard."
    drawn = images.shown(every)
    more = len(every) - len(drawn)
    return (
        drawn,
        f"{wording.counted(more, 'more picture')}: tensorboard --logdir {short_path(run.path)}" if more else "",
    )


def texts(run: RunFolder) -> dict[str, list[tuple[str, Markup]]]:
    """Return the last texts of every name, newest first; a text logged again unchanged appears once."""
    by_name: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for line in run.texts:
        seen = by_name.setdefault(line["name"], [])
        since = line.get("update")
        if seen and seen[-1][0]["text"] == line["text"]:
            since = seen.pop()[1]
        seen.append((line, since))
    return {
        name: [(_when(line, since), as_html(line["text"])) for line, since in lines[-MOST_TEXTS:][::-1]]
        for name, lines in by_name.items()
    }


def _when(line: Mapping[str, Any], since: Any) -> str:
    update = line.get("update")
    return f"at update {update}" + ("" if since == update else f", unchanged since {since}")


def card_rows(run: RunFolder, is_only_attempt: bool) -> list[list[Any]]:
    """Return the run card as rows; the table of attempts shows when and by which command a resumed run started."""
    card = run.card
    task, resumed_from = as_dict(card.get("task")), card.get("resumed_from")
    own = {
        "started": card.get("started"),
        "command": card.get("command"),
        "resumed from": None if resumed_from is None else f"update {resumed_from}",
    }
    rows = {
        **(own if is_only_attempt else {}),
        "recipe": card.get("recipe"),
        "task": f"{task.get('class')}({_options(task.get('options'))})" if task else None,
        "parameters": f"{count:,}" if type(count := task.get("parameters")) is int else "",
        "optimizer": ", ".join(map(str, as_dict(card.get("optimizers")).values())),
        "seed": wording.value_text(card.get("seed")) if card.get("seed") is not None else None,
        "device": card.get("device"),
        "ranks": card.get("world"),
        "job": card.get("job"),
        "kept as saved": wording.kept_options(card.get("kept_options")),
        "resume": card.get("resume"),
        "machine": card.get("machine"),
        "versions": ", ".join(f"{name} {version}" for name, version in as_dict(card.get("versions")).items()),
        "git": compare.surroundings(run).get("commit"),
    }
    return [[key, value] for key, value in rows.items() if value not in (None, "")]


def cost_rows(run: RunFolder) -> list[list[Any]]:
    """Return the time that each hook of a plugin took as rows; a row of another shape is skipped."""
    rows = []
    for row in run.costs:
        match row:
            case {"plugin": plugin, "hook": hook, "us_per_update": float(spent), "share": float(share)}:
                name = str(hook).removeprefix("forge_") + (" (validation)" if row.get("in_validation") else "")
                calls = row.get("calls_per_update")
                often = f"{calls:.3g}" if isinstance(calls, float) else ""
                rows.append([plugin, name, often, f"{spent:,.1f}", f"{100 * share:.1f} %"])
    return rows


def comparison(runs: Sequence[RunFolder], labels: Sequence[str]) -> dict[str, Any]:
    """Return the tables of a page about several runs."""
    parts = compare.compare(runs)
    results = told_once(parts["result"])
    differences = [compare.difference(values) for values in results.values()]
    result = _cells(results, wording.number)
    if len(runs) == 2:
        result = [[*row, wording.signed(d) if d else ""] for row, d in zip(result, differences, strict=True)]
    many = by_run(runs, labels, parts) if len(runs) > MOST_COLUMNS else None
    return {
        "many": many,
        "runs": [
            [
                label,
                r.name,
                r.progress if isinstance(r, RunGroup) else r.status,
                f"{r.updates:,}",
                wording.duration(r.seconds),
                wording.moment(r.started),
            ]
            for label, r in zip(labels, runs, strict=True)
        ],
        "result": result,
        "recipe": _cells(parts["recipe"], wording.value_text),
        "surroundings": _cells(parts["surroundings"], wording.value_text),
    }


def by_run(runs: Sequence[RunFolder], labels: Sequence[str], parts: Mapping[str, compare.Rows]) -> dict[str, Any]:
    """Return one table with a row for each run: what differs in its recipe first, then its results, validation's
    before training's."""
    chosen = {key: values for key, values in parts["recipe"].items() if len({str(value) for value in values}) > 1}
    order = ("test/", "val/", "best ", "train/")
    measured = {key: values for key, values in parts["result"].items() if key.startswith(order)}
    results = {
        key: values
        for start in order
        for key, values in measured.items()
        if key.startswith(start) and not key.endswith("_epoch")
        # the best value is no news where it is the last
        if not (start == "best " and values == measured.get(key.removeprefix(start)))
    }
    names = [key.removeprefix("task.").removeprefix("trainer.") for key in chosen]
    heads = ["", "run", *map(_breakable, [*names, *results])]
    rows = [
        [
            label,
            run.path.name,
            *("–" if values[i] is None else wording.value_text(values[i]) for values in chosen.values()),
            *("–" if values[i] is None else wording.number(values[i]) for values in results.values()),
        ]
        for i, (label, run) in enumerate(zip(labels, runs, strict=True))
    ]
    return {"heads": heads, "rows": rows, "numbers": list(range(2 + len(chosen), len(heads)))}


def _breakable(name: str) -> str:
    """Return a name that a narrow column may break after / . and _."""
    return re.sub(r"([/._])", "\\1\u200b", name)


def _cells(rows: compare.Rows, text: Any) -> list[list[Any]]:
    return [[key, *("–" if value is None else text(value) for value in values)] for key, values in rows.items()]


def _options(values: Any) -> str:
    return ", ".join(f"{key}={wording.value_text(value)}" for key, value in as_dict(values).items())
