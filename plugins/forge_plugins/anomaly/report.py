"""Format a finding as a block of text."""

from __future__ import annotations

from typing import Any

from forge.util.patterns import listed
from forge.util.text import few, short_path

ROWS = 8
"""Number of samples that are listed one by one."""
IRREPRODUCIBLE = "it did not happen again: something in the step is not deterministic (try trainer.deterministic=true)"


def headline(finding: dict[str, Any]) -> str:
    """Return what is wrong, in one sentence."""
    turn = f", optimizer {finding['optimizer']!r}" if finding["optimizer"] else ""
    where = f"update {finding['update']} (epoch {finding['epoch']}{turn})"
    bad = [loss for loss in finding["losses"] if loss != loss or abs(loss) == float("inf")]
    grads, total = finding["gradients"], finding["parameters"]
    which = f"{len(grads)} of {total} gradients are not finite ({listed(grads)})"
    if bad:
        return f"{where}: the loss is {bad[0]:g}{f', and {which}' if grads else ', though every gradient is finite'}."
    if grads:
        return f"{where}: the loss is finite, but {which}."
    return f"{where}: the loss or a gradient was not finite, but in a second run everything is finite."


def report(finding: dict[str, Any], title: str = "") -> str:
    """Return the full report, under its headline or another title."""
    lines = [title or headline(finding), *(f"  {label:<9} {text}" for label, text in _lines(finding) if text)]
    return "\n".join(lines)


def _lines(finding: dict[str, Any]) -> list[tuple[str, str]]:
    kind = finding["kind"]
    lines: list[tuple[str, str]] = []
    if kind in ("forward", "backward"):
        lines += _operation("first", finding)
        lines += [("input" if i == 0 else "", _tensor(given)) for i, given in enumerate(finding["inputs"])]
        lines += [("output", _tensor(finding["output"]))]
    elif kind == "none":
        lines.append(("cause", IRREPRODUCIBLE))
    else:
        lines += _source(finding)
    lines += [("samples", _samples(finding))]
    if "then" in finding:
        lines += _operation("then", finding["then"])
    if "given" in finding:
        lines.append(("note", _given(finding["given"])))
    for data in finding["data"]:
        if kind != "batch" or data["name"] != finding["name"]:
            lines.append(("data", f"{data['name']} is not finite: {_bad(data)}{_in_rows(data)}"))
    if finding["weights"] and kind != "parameter":
        lines.append(("weights", f"not finite before this window: {listed(finding['weights'])}"))
    if finding["batch_changed"]:
        lines.append(("note", "the step changes its batch in place, so this second run saw other data than the first"))
    if "error" in finding:
        lines.append(("note", f"the second run ended early: {finding['error']}"))
    return lines


def _operation(label: str, event: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines for an operation and its place."""
    module = f"{event['module']} ({event['class']})" if event["module"] else f"the task ({event['class']})"
    within = f"in {event['node']}, the backward of {module}" if event["node"] else f"in {module}"
    place = event["place"]
    lines = [(label, f"{event['made']} from {_op(event)} {within}")]
    if place is not None:
        where = f"{short_path(place['file'])}:{place['line']} in {place['function']}"
        lines.append(("", f"{where}:  {place['code']}" if place["code"] else where))
    return lines


def _source(finding: dict[str, Any]) -> list[tuple[str, str]]:
    kind, name = finding["kind"], finding["name"]
    if kind == "batch":
        data = next((data for data in finding["data"] if data["name"] == name), None)
        lines = [("first", f"{name}, as the loader gave it, is not finite{f': {_bad(data)}' if data else ''}")]
    elif kind == "constant":
        lines = [("first", "a tensor that is neither a parameter, a buffer nor part of the batch is not finite")]
    else:
        lines = [("first", f"the {kind} {name} was not finite before this window")]
    if "met" in finding:
        (_, text), *rest = _operation("", finding["met"])
        lines += [("met by", text.partition(" from ")[2]), *rest]
    return lines


def _given(origin: dict[str, Any]) -> str:
    if "op" not in origin:
        return f"its infinite input is {'the buffer ' + origin['name'] if origin['name'] else 'a constant'}"
    place = origin["place"]
    where = f" at {short_path(place['file'])}:{place['line']}" if place else ""
    return f"its infinite input was made by {_op(origin)}{where}: a mask over all positions?"


def _samples(finding: dict[str, Any]) -> str:
    rows, of = finding.get("rows"), finding.get("of")
    if not rows or not of:
        return ""
    micro = f" of micro-batch {finding['micro'] + 1} of {finding['micros']}" if finding["micros"] > 1 else ""
    if len(rows) == of and of > 1:
        return f"all {of} rows{micro or ' of the batch'}"
    text = f"row {rows[0]}" if len(rows) == 1 else f"rows {few(map(str, rows), ROWS)}"
    text += f"{micro or ' of the batch'} ({len(rows)} of {of})"
    if indices := finding.get("samples"):
        text += f", {'index' if len(rows) == 1 else 'indices'} {few(map(str, indices), ROWS)} of the dataset"
    return text


def _in_rows(data: dict[str, Any]) -> str:
    if "rows" not in data:
        return ""
    indices = f" (dataset {few(map(str, data['samples']), ROWS)})" if data.get("samples") else ""
    return f", in row{'s' if len(data['rows']) > 1 else ''} {few(map(str, data['rows']), ROWS)}{indices}"


def _tensor(values: dict[str, Any]) -> str:
    """ "float32 (32, 10), 0 to 5.31, 3 zeros"."""
    parts = [f"{values['dtype']} ({', '.join(map(str, values['shape']))})".replace("()", "scalar")]
    if "min" in values:
        same = values["min"] == values["max"]
        parts.append(f"{values['min']:.4g}" if same else f"{values['min']:.4g} to {values['max']:.4g}")
        if values["zeros"] and not same:
            parts.append(f"{values['zeros']} zero{'s' if values['zeros'] > 1 else ''}")
    bad = _bad(values)
    return ", ".join([*parts, bad] if bad else parts)


def _bad(values: dict[str, Any]) -> str:
    counts = [f"{values[key]} {label}" for key, label in (("nan", "NaN"), ("inf", "infinite")) if values.get(key)]
    return " and ".join(counts)


def _op(event: dict[str, Any]) -> str:
    """ "log_softmax" for aten._log_softmax."""
    return event["op"].removeprefix("aten.").lstrip("_")
