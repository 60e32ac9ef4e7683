"""The layout of TensorBoard's CUSTOM SCALARS page: charts, their scalars, and their order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import forge
from forge_plugins.tensorboard.events import file_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Layout = dict[str, dict[str, str]]
"""Sections, with titles of charts, and for each chart the pattern of its names."""
BOTH_STAGES = "training and validation"
RATES = r"lr(/.+)?"


def make(names: Iterable[str], plugins: Iterable[forge.Plugin]) -> Layout:
    """Return the charts that have data.

    They use patterns rather than names, in an order independent of the stack: TensorBoard merges the layouts of several
    runs chart by chart, by comparing them.
    """
    known = sorted(names)
    by_name = sorted(plugins, key=lambda plugin: plugin.name)
    declared = [chart for plugin in by_name for chart in plugin.charts.items()]
    declared.sort(key=lambda chart: chart[0].partition("/")[0])  # within a section in the order of declaration
    charts = [*_both_stages(known), ("learning rate/learning rate", RATES), *declared]
    made: Layout = {}
    for where, pattern in charts:
        if any(re.fullmatch(pattern, name) for name in known):
            section, _, title = where.partition("/")
            made.setdefault(section, {})[title] = pattern
    return made


def _both_stages(names: list[str]) -> list[tuple[str, str]]:
    """Return a chart for each metric of both training and validation, the loss first."""
    trained = [name.removeprefix("train/") for name in names if name.startswith("train/")]
    charts = []
    for metric in sorted(trained, key=lambda metric: (metric != "loss", metric)):
        validation = rf"val/([^/]+/)?{re.escape(metric)}"
        if any(re.fullmatch(validation, name) for name in names):
            charts.append((f"{BOTH_STAGES}/{metric}", rf"train/{re.escape(metric)}|{validation}"))
    return charts


def add(writer: SummaryWriter, layout: Layout, update: int) -> None:
    """Write this layout; TensorBoard uses the latest."""
    from torch.utils.tensorboard.summary import custom_scalars

    # TensorBoard matches patterns from the start of a name, but not up to its end
    charts = {
        section: {title: ["Multiline", [rf"(?:{pattern})$"]] for title, pattern in titles.items()}
        for section, titles in layout.items()
    }
    file_of(writer).add_summary(custom_scalars(charts), update)
