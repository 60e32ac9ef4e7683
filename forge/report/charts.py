"""Which curves of a run, or of several, stand in which chart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge.report.svg import COLORS, DASHES, Chart, Look, Point
from forge.runs.folder import Run

STAGES = ("train", "val", "test")
TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "ledger": "time in plugins, µs per update",
    "samples_per_s": "samples per second",
    "tokens_per_s": "tokens per second",
    "items_per_s": "items per second",
    "step_ms": "milliseconds per step",
}
FIRST = ("loss", "accuracy")
LAST = ("lr", "grad_norm", "samples_per_s", "tokens_per_s", "step_ms", "ledger")
MOST_SERIES = 14
MOST_CHARTS = 80
WIDTH, HEIGHT = 560, 290


@dataclass
class Panel:
    """A chart to be drawn."""

    key: str
    series: dict[str, Sequence[Point]] = field(default_factory=dict)
    is_aside: bool = False
    "Whether it belongs to a plugin's own notes, which are folded away."
    looks: dict[str, Look] = field(default_factory=dict)
    "Of several runs: the colour of the run, and the line of its stage."

    @property
    def title(self) -> str:
        return TITLES.get(self.key, self.key)

    @property
    def rank(self) -> tuple[int, int, str]:
        """Results first, then how training went, then the rest."""
        if self.key in FIRST:
            return 0, FIRST.index(self.key), ""
        if self.key in LAST:
            return 2, LAST.index(self.key), ""
        return (3 if self.is_aside else 1), 0, self.key

    def draw(self) -> str:
        values = [y for points in self.series.values() for _, y in points if math.isfinite(y)]
        steep = bool(values) and min(values) > 0 and max(values) > 100 * min(values)
        log_y = steep and (self.key == "grad_norm" or "loss" in self.key)
        alone = list(self.series) == [self.key]
        series = {self.title: self.series[self.key]} if alone else self.series  # the title says it all
        looks = [self.looks[name] for name in self.series] if self.looks else []
        if len(set(looks)) < len(looks):  # too many to be told apart so
            looks = []
        return Chart(series, self.title, "update", "", WIDTH, HEIGHT, log_y, looks).draw(styled=False)


def panels(runs: Mapping[str, Run]) -> list[Panel]:
    """The charts of runs by label; with one run the label is left out."""
    found: dict[str, Panel] = {}
    for number, (label, run) in enumerate(runs.items()):
        plugins = _plugins(run)
        drawn: Counter[str] = Counter()
        for name, points in run.series.items():
            if name.startswith("test/") and len(points) == 1:
                continue
            key, line, is_aside = place(name, plugins)
            panel = found.setdefault(key, Panel(key, is_aside=is_aside))
            if len(runs) == 1:
                panel.series[line] = points
                continue
            curve = f"{label} {line}".removesuffix(f" {key}")
            panel.series[curve] = points
            panel.looks[curve] = _look(number, STAGES.index(line) if line in STAGES else drawn[key])
            drawn[key] += 1
    every = [part for panel in found.values() for part in _parts(panel)]
    return sorted(every, key=lambda panel: panel.rank)


def place(name: str, plugins: frozenset[str]) -> tuple[str, str, bool]:
    """(chart, curve, whether it is a plugin's own note) of a metric."""
    head, _, rest = name.partition("/")
    last = name.rpartition("/")[2]
    if head in STAGES and rest:
        return last, name.removesuffix(f"/{last}"), False
    if head in ("lr", "grad_norm"):
        return head, rest or head, False
    if head == "throughput" and last.startswith("step_ms"):
        return "step_ms", last.removeprefix("step_ms_"), False
    if head == "throughput" and last.endswith("_per_s"):
        return last, last, False
    if head == "ledger" and rest not in ("total_share", "syncs_per_update"):
        return head, rest, False
    if head in plugins:
        return name, last, True
    return name, name, False


def _parts(panel: Panel) -> list[Panel]:
    """More curves than one can tell apart become several charts."""
    names = list(panel.series)
    if len(names) <= MOST_SERIES:
        return [panel]
    chunks = [names[i : i + MOST_SERIES] for i in range(0, len(names), MOST_SERIES)]
    return [
        Panel(panel.key, {name: panel.series[name] for name in chunk}, panel.is_aside, panel.looks) for chunk in chunks
    ]


def _look(run: int, line: int) -> Look:
    """One colour a run in every chart, training drawn through and validation dashed."""
    return run % COLORS, line % len(DASHES)


def _plugins(run: Run) -> frozenset[str]:
    return frozenset(str(plugin.get("name")).partition("@")[0] for plugin in run.stack)
