"""One HTML page about a run, or several side by side: nothing is loaded from elsewhere, and nothing runs in it.

Whatever comes from a run passes through `esc` on its way in, because the run may be a stranger's.
"""

from __future__ import annotations

import html
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forge.report import images
from forge.report.charts import MOST_CHARTS, panels
from forge.report.markdown import as_html
from forge.report.style import SHEET
from forge.runs import compare, wording
from forge.runs.attempts import left_out, lives_of, shown
from forge.runs.folder import Run
from forge.util.text import short_path
from forge.version import __version__

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the browser is told: no script, no font, no request, no picture that is not in the page itself."""
MOST_TEXTS = 10
SMALL = 160
"""A picture of fewer pixels across is drawn larger, by whole pixels."""


def esc(value: Any) -> str:
    """A value from a run as text of the page."""
    return html.escape(str(value), quote=True)


def page(runs: Sequence[Run]) -> str:
    """The whole document."""
    title = title_of(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"
    body = one(runs[0]) if len(runs) == 1 else several(runs)
    made = f"Made by forge {esc(__version__)} on {time.strftime('%Y-%m-%d %H:%M')}."
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{esc(title)}</title>\n<style>{SHEET}</style>\n</head>\n<body>\n<main>\n"
        f"{body}<footer>{made}</footer>\n</main>\n</body>\n</html>\n"
    )


def title_of(run: Run) -> str:
    return f"{run.subject or 'run'} · {run.path.absolute().name}"


# -- one run ----------------------------------------------------------------------------------------------------------


def one(run: Run) -> str:
    badge = f'<span class="badge {esc(run.status)}">{esc(run.status)}</span>'
    parts = [
        f"<h1>{esc(title_of(run))} {badge}</h1>\n<p class='soft'>{esc(outcome(run))}</p>\n",
        tiles(run),
        section("Metrics", metrics_table(run)),
        curves({"": run}),
        section("Pictures", pictures(run)),
        section("Samples", texts(run)),
        section("Lives", lives(run)),
        section("Run card", card(run)),
        *[fold(name, text) for name, text in details(run)],
    ]
    return "".join(parts)


def outcome(run: Run) -> str:
    """In one sentence, how it went."""
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
            return f"Ended without a word after {done}, as a killed process does."
    return f"{done}; whether it still runs cannot be told from here."


def tiles(run: Run) -> str:
    rate = run.rate or 0.0
    values = {
        "updates": f"{run.updates:,}",
        "epochs": f"{run.epochs:,}",
        "time": wording.duration(run.seconds),
        "samples per second, overall": wording.number(round(rate)) if rate else "",
        "parameters": wording.count(_mapping(run.card.get("task")).get("parameters")),
        "device": str(run.card.get("device") or ""),
    }
    for name, (_, value) in list(compare.bests(run).items())[:2]:
        values[f"best {name}"] = wording.number(value)
    shown = [
        f"<div class='tile'><b>{esc(value)}</b><span>{esc(label)}</span></div>"
        for label, value in values.items()
        if value
    ]
    return f"<div class='tiles'>{''.join(shown)}</div>\n"


def metrics_table(run: Run) -> str:
    best = compare.bests(run)
    rows = []
    for name in compare.metrics_of(run):
        at, value = best.get(name, ("", None))
        rows.append([name, wording.number(run.final[name]), "" if value is None else wording.number(value), at])
    return table(["metric", "last", "best", "at update"], rows, numbers=(1, 2, 3)) if rows else ""


def curves(runs: Mapping[str, Run]) -> str:
    every = panels(runs)
    drawn = every[:MOST_CHARTS]
    own = [panel.draw() for panel in drawn if not panel.is_aside]
    aside = [panel.draw() for panel in drawn if panel.is_aside]
    parts = [section("Curves", _charts(own))]
    if aside:
        parts.append(fold(f"{wording.counted(len(aside), 'chart')} of plugins", _charts(aside)))
    if len(every) > len(drawn):
        parts.append(f"<p class='soft'>{len(every) - len(drawn)} more charts were left out.</p>\n")
    return "".join(parts)


def _charts(drawn: Sequence[str]) -> str:
    cards = "".join(f"<div class='card'>{chart}</div>\n" for chart in drawn)
    return f"<div class='charts'>\n{cards}</div>\n" if drawn else ""


def pictures(run: Run) -> str:
    """The last picture of every name, out of the run's TensorBoard files."""
    folder = run.path / "tensorboard"
    if not folder.is_dir():
        return ""
    try:
        every = images.pictures(folder)
    except ImportError:
        return (
            "<p class='soft'>Pictures can be shown here where TensorBoard is installed: pip install tensorboard.</p>\n"
        )
    drawn = images.shown(every)
    figures = map(_figure, drawn)
    more = f"{wording.counted(len(every) - len(drawn), 'more picture')}: forge board {short_path(run.path)}"
    left_out = f"<p class='soft'>{esc(more)}</p>\n" if len(every) > len(drawn) else ""
    return f"<div class='pictures'>\n{''.join(figures)}</div>\n{left_out}" if every else ""


def _figure(picture: images.Picture) -> str:
    across = int.from_bytes(picture.png[16:20], "big")
    source = f"data:image/png;base64,{b64encode(picture.png).decode()}"
    return (
        f"<figure class='card'><figcaption>{esc(picture.name)} "
        f"<span class='soft'>at update {picture.update}</span></figcaption>"
        f"<img{' class=small' if across < SMALL else ''} alt='{esc(picture.name)}' src='{source}'></figure>\n"
    )


def texts(run: Run) -> str:
    """The last texts of every name, newest first; one that was logged again unchanged is there once."""
    by_name: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for line in run.texts:
        seen = by_name.setdefault(line["name"], [])
        since = line.get("update")
        if seen and seen[-1][0]["text"] == line["text"]:
            since = seen.pop()[1]
        seen.append((line, since))
    parts = []
    for name, lines in by_name.items():
        (newest, since), *older = lines[-MOST_TEXTS:][::-1]
        parts.append(f"<h3>{esc(name)} <span class='soft'>{esc(_when(newest, since))}</span></h3>")
        parts.append(as_html(newest["text"]))
        parts += [fold(_when(line, since), as_html(line["text"])) for line, since in older]
    return f"<div class='card'>{''.join(parts)}</div>\n" if parts else ""


def _when(line: Mapping[str, Any], since: Any) -> str:
    update = line.get("update")
    return f"at update {update}" + ("" if since == update else f", unchanged since {since}")


def lives(run: Run) -> str:
    """How a run came about that was continued: the command of each life, and what changed on the way."""
    every = lives_of(run)
    if len(every) < 2:
        return ""
    rows = [[n, life.started, life.update, life.command, ", ".join(changed)] for n, life, changed in shown(every)]
    heads = ["", "started", "from update", "command", "what changed"]
    width = None if any(row[-1] for row in rows) else -1
    more = f"<p class='soft'>{esc(left_out(every))}</p>\n" if left_out(every) else ""
    return table(heads[:width], [row[:width] for row in rows], numbers=(1, 2)) + more


def card(run: Run) -> str:
    """What ran, on what; when, and by which command, where `lives` does not say it."""
    data, once = run.card, len(lives_of(run)) < 2
    if not data:
        return ""
    task = data.get("task") if isinstance(data.get("task"), dict) else {}
    rows = {
        "started": data.get("started") if once else None,
        "command": data.get("command") if once else None,
        "recipe": data.get("recipe"),
        "task": f"{task.get('class')}({_options(task.get('options'))})" if task else None,
        "parameters": _parameters(run),
        "optimizer": ", ".join(map(str, _mapping(data.get("optimizers")).values())),
        "seed": data.get("seed"),
        "device": data.get("device"),
        "ranks": data.get("world"),
        "resumed from": f"update {data['resumed_from']}" if once and data.get("resumed_from") is not None else None,
        "kept as saved": wording.kept_options(data.get("kept_options")),
        "machine": data.get("machine"),
        "versions": ", ".join(f"{name} {version}" for name, version in _mapping(data.get("versions")).items()),
        "git": compare.surroundings(run).get("commit"),
    }
    about = [[key, value] for key, value in rows.items() if value not in (None, "")]
    stack = [[plugin.get("name"), _options(plugin.get("options"))] for plugin in run.stack]
    return (
        "<div class='two'>"
        + table([], about)
        + (table(["plugin, outermost first", "options"], stack) if stack else "")
        + "</div>\n"
    )


def details(run: Run) -> Iterable[tuple[str, str]]:
    """What is folded away: (heading, content)."""
    ledger = ledger_table(run)
    if ledger:
        yield "What plugins cost", ledger
    if run.checkpoints:
        rows = [[c.name, ", ".join(c.marks), wording.size(c.bytes)] for c in run.checkpoints]
        yield wording.counted(len(rows), "checkpoint"), table(["checkpoint", "", "size"], rows, numbers=(2,))
    if run.recipe_text:
        yield "Recipe, as it ran", f"<pre>{esc(run.recipe_text)}</pre>"


def ledger_table(run: Run) -> str:
    """RUN/ledger.json as the plugin ledger wrote it."""
    rows = []
    for row in run.costs:
        match row:
            case {"plugin": plugin, "hook": hook, "us_per_update": float(spent), "share": float(share)}:
                name = str(hook).removeprefix("forge_") + (" (validation)" if row.get("in_validation") else "")
                calls = row.get("calls_per_update")
                often = f"{calls:.3g}" if isinstance(calls, float) else ""
                rows.append([plugin, name, often, f"{spent:,.1f}", f"{100 * share:.1f} %"])
    return table(["plugin", "hook", "calls", "µs per update", "share"], rows, numbers=(2, 3, 4)) if rows else ""


# -- several runs -----------------------------------------------------------------------------------------------------


def several(runs: Sequence[Run]) -> str:
    """Overlaid curves, and tables of what differs."""
    labels = {chr(ord("A") + i) if i < 26 else str(i + 1): run for i, run in enumerate(runs)}
    rows = [
        [label, run.name, run.status, f"{run.updates:,}", wording.duration(run.seconds), wording.moment(run.started)]
        for label, run in labels.items()
    ]
    parts = compare.compare(runs)
    shown = [
        section("Results", _rows(parts["result"], labels, wording.number, numbers=True)),
        curves(labels),
        section("What differs in the recipe", _rows(parts["recipe"], labels, wording.value_text) or _none()),
        section("What differs around it", _rows(parts["surroundings"], labels, wording.value_text) or _none()),
    ]
    for label, run in labels.items():
        inside = [
            card(run),
            section("Lives", lives(run)),
            section("Pictures", pictures(run)),
            section("Samples", texts(run)),
        ]
        inside += [fold(name, text) for name, text in details(run)]
        shown.append(fold(f"{label}: {title_of(run)}", f"<p class='soft'>{esc(outcome(run))}</p>" + "".join(inside)))
    heading = f"<h1>{len(runs)} runs</h1>\n"
    return heading + table(["", "run", "status", "updates", "time", "started"], rows, numbers=(3, 4)) + "".join(shown)


def _rows(rows: compare.Rows, labels: Mapping[str, Run], tell: Any, numbers: bool = False) -> str:
    if not rows:
        return ""
    heads = ["", *labels, *["difference"] * (numbers and len(labels) == 2)]
    filled = [[key, *("–" if value is None else tell(value) for value in values)] for key, values in rows.items()]
    for line, values in zip(filled, rows.values(), strict=True):
        change = compare.difference(values) if "difference" in heads else None
        line += [wording.signed(change) if change else ""] * (len(heads) - len(line))
    columns = range(1, len(heads)) if numbers else ()
    return table(heads, filled, numbers=tuple(columns))


def _none() -> str:
    return "<div class='card soft'>nothing</div>\n"


# -- pieces -----------------------------------------------------------------------------------------------------------


def section(heading: str, content: str) -> str:
    return f"<h2>{esc(heading)}</h2>\n{content}" if content else ""


def fold(heading: str, content: str) -> str:
    return f"<details><summary>{esc(heading)}</summary>\n{content}</details>\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    """Cells are texts from the run, and escaped here."""
    kinds = {0: " class='k'", **dict.fromkeys(numbers, " class='n'")}
    head = "".join(f"<th{' class=n' if i in numbers else ''}>{esc(text)}</th>" for i, text in enumerate(heads))
    lines = ["".join(f"<td{kinds.get(i, '')}>{esc(cell)}</td>" for i, cell in enumerate(row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f"<div class='card'><table>{f'<tr>{head}</tr>' if head else ''}\n{body}</table></div>\n"


def _options(values: Any) -> str:
    return ", ".join(f"{key}={wording.value_text(value)}" for key, value in _mapping(values).items())


def _parameters(run: Run) -> str:
    count = _mapping(run.card.get("task")).get("parameters")
    return f"{count:,}" if type(count) is int else ""


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
