"""Group the curves of one or several runs into charts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge import registry
from forge.report.svg import COLORS, DASHES, Band, Chart, Look, Point
from forge.runs.folder import RunFolder
from forge.runs.group import RunGroup

STAGES = ("train", "val", "test")
TITLES = {"lr": "learning rate", "grad_norm": "gradient norm"}
FIRST = ("loss", "accuracy")
LAST = ("lr", "grad_norm")
DECLARED = ": "
"""Stands between section and title of a chart that a plugin declares."""
MOST_SERIES = 2 * COLORS
MOST_RUNS = COLORS
"""With more runs, each stage has a chart of its own, in which colour and dashes tell runs apart."""
MOST_CHARTS = 80
WIDTH, HEIGHT = 560, 290


@dataclass
class Panel:
    """A chart to be drawn."""

    key: str
    series: dict[str, Sequence[Point]] = field(default_factory=dict)
    is_aside: bool = False
    "Whether it shows what a plugin logs about itself and declares no chart of, which is folded away."
    looks: dict[str, Look] = field(default_factory=dict)
    "With several runs: the colour of the run, and the dashes of its stage; with many, both of the run."
    bands: dict[str, Band] = field(default_factory=dict)
    "Of groups: one standard deviation around the mean."
    line: str = ""
    "With many runs: the stage or part that all its curves show."

    @property
    def title(self) -> str:
        named = TITLES.get(self.key, self.key)
        return f"{named}, {self.line}" if self.line and self.line != self.key else named

    @property
    def rank(self) -> tuple[int, int, str]:
        """Sort results first, then other metrics, then the course of training, then plugins."""
        of_epochs = self.key.removesuffix("_epoch")
        if of_epochs in FIRST:
            return int(of_epochs != self.key), FIRST.index(of_epochs) - len(FIRST), ""
        if self.key in LAST:
            return 2, LAST.index(self.key), ""
        return (4 if self.is_aside else 3 if DECLARED in self.key else 1), 0, self.key

    def chart(self) -> Chart:
        """Return the chart, for a page that writes its title and its legend."""
        values = [y for points in self.series.values() for _, y in points if math.isfinite(y)]
        steep = bool(values) and min(values) > 0 and max(values) > 100 * min(values)
        log_y = steep and (self.key == "grad_norm" or "loss" in self.key)
        alone = list(self.series) == [self.key]
        rename = {self.key: self.title} if alone else {}  # no legend needed
        series = {rename.get(name, name): points for name, points in self.series.items()}
        bands = {rename.get(name, name): band for name, band in self.bands.items()}
        looks = [self.looks[name] for name in self.series] if self.looks else []
        if len(set(looks)) < len(looks):  # too many to distinguish this way
            looks = []
        return Chart(series, self.title, "update", "", WIDTH, HEIGHT, log_y, looks, bands, on_page=True)


def panels(runs: Mapping[str, RunFolder]) -> list[Panel]:
    """Return the charts of runs by label; the label of a single run is omitted."""
    found: dict[str, Panel] = {}
    for number, (label, run) in enumerate(runs.items()):
        plugins, charts = _plugins(run), _charts(run)
        drawn: Counter[str] = Counter()
        bands = {name: band for name, (_, band) in run.curves.items()} if isinstance(run, RunGroup) else {}
        series = dict(run.series)
        for name in list(series):
            if _replaces(name, series):
                base = name.removesuffix("_epoch")
                series[base], bands[base] = series.pop(name), bands.get(name, [])
        for name, points in series.items():
            if name.startswith("test/") and len(points) == 1:
                continue
            key, line, is_aside = place(name, plugins, charts)
            points = on_grid(points) if line == "train" else points
            kept = {x for x, _ in points}
            band = [at for at in bands.get(name, ()) if at[0] in kept]
            if len(runs) > MOST_RUNS:
                panel = found.setdefault(f"{key}, {line}", Panel(key, is_aside=is_aside, line=line))
                panel.series[label] = points
                panel.bands[label] = band
                panel.looks[label] = number % COLORS, number // COLORS % len(DASHES)
                continue
            panel = found.setdefault(key, Panel(key, is_aside=is_aside))
            if len(runs) == 1:
                panel.series[line], panel.bands[line] = points, band
                continue
            curve = f"{label} {line}".removesuffix(f" {key}")
            panel.series[curve], panel.bands[curve] = points, band
            dashes = STAGES.index(line) if line in STAGES else drawn[key]
            panel.looks[curve] = number % COLORS, dashes % len(DASHES)
            drawn[key] += 1
    every = [part for panel in found.values() for part in _parts(panel)]
    return sorted(every, key=lambda panel: panel.rank)


def place(name: str, plugins: frozenset[str], charts: Mapping[str, str]) -> tuple[str, str, bool]:
    """Return (chart, curve, whether it is folded away) of a metric; `charts` are those that plugins declare."""
    head, _, rest = name.partition("/")
    last = name.rpartition("/")[2]
    if head in STAGES and rest:
        return last, name.removesuffix(f"/{last}"), False
    if head in ("lr", "grad_norm"):
        return head, rest or head, False
    for chart, pattern in charts.items():
        if re.fullmatch(pattern, name):
            return chart, rest, False
    if head in plugins:
        return name, last, True
    return name, name, False


def on_grid(points: Sequence[Point]) -> Sequence[Point]:
    """Return the points at the multiples of one interval, and the last one.

    Training metrics are logged at an interval and wherever a validation or an epoch ends; a point between two others is
    a mean of fewer updates, and draws a cliff. Points that have no such interval are returned unchanged.
    """
    places = {x for x, _ in points if x > 0}
    steps = [step for step in sorted(places) if all(step * i in places for i in range(1, int(max(places) // step) + 1))]
    if not steps or len(places) < 3 or max(places) < 3 * steps[0]:
        return points
    return [(x, y) for x, y in points if x % steps[0] == 0 or (x, y) == points[-1]]


def _replaces(name: str, series: Mapping[str, Sequence[Point]]) -> bool:
    """Whether it is a mean of epochs, and the metric itself is drawn nowhere but at their ends."""
    log = on_grid(series.get(name.removesuffix("_epoch"), ()))
    return name.endswith("_epoch") and {x for x, _ in log} <= {x for x, _ in series[name]}


def _parts(panel: Panel) -> list[Panel]:
    """Split a chart with too many curves to distinguish."""
    names = list(panel.series)
    most = COLORS * len(DASHES) if panel.line else MOST_SERIES
    if len(names) <= most:
        return [panel]
    chunks = [names[i : i + most] for i in range(0, len(names), most)]
    return [
        Panel(
            panel.key,
            {name: panel.series[name] for name in chunk},
            panel.is_aside,
            panel.looks,
            {name: panel.bands[name] for name in chunk},
            panel.line,
        )
        for chunk in chunks
    ]


def _plugins(run: RunFolder) -> frozenset[str]:
    return frozenset(str(plugin.get("name")).partition("@")[0] for plugin in run.stack)


def _charts(run: RunFolder) -> dict[str, str]:
    """Return the charts of a run's plugins, as those installed here declare them: a run folder may be a stranger's."""
    declared = registry.declared("charts")
    return {
        chart.replace("/", DECLARED, 1): pattern
        for name in sorted(_plugins(run) & declared.keys())
        for chart, pattern in declared[name].items()
    }
