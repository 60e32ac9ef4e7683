"""Combining: the plugins of a layout, and whether a trainer accepts them.

What combines is asked of the plugins, by the rule that a trainer goes by: a stack of them checks its declarations, and
each axis of the mesh must have an owner. So a plan offers what can be trained, whatever is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.config.build import make_plugins
from forge.contract import axes
from forge.contract.stack import Stack
from forge.errors import StackError
from forge_cluster.planning.layouts import Layout
from forge_cluster.planning.workload import AMP, APART, REMAT

SCHEDULES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved_1f1b",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zbv",
}
"""Values of pipeline.schedule, by torch's names."""
KEPT = ("compile",)
"""Planned with, and neither added nor removed."""
UNSAID = {"plan": {"*": "column"}}
"""For an option that a plan leaves to the user."""

Options = dict[str, Any]


def plugins_of(layout: Layout) -> dict[str, Options]:
    """Return the plugins of a layout with their options; the sizes are its mesh's."""
    found: dict[str, Options] = {}
    if layout.data.startswith("zero"):
        found["zero"] = {"stage": int(layout.data.removeprefix("zero"))}
    elif layout.data != "single" and layout.pipeline == 1:  # pipelines copy and divide their stages themselves
        found[layout.data] = {"reduce": "micro"} if layout.scatters else {}
    if layout.pipeline > 1:
        found["pipeline"] = {"schedule": SCHEDULES[layout.schedule or ""], "microbatches": layout.micros}
    elif layout.micros > 1:
        found["accumulate"] = {"window": layout.micros}
    found |= {name: {} for name, size in layout.divided.items() if size > 1}
    if layout.variant.precision == "bf16":
        found.setdefault("fsdp", {})["mixed_precision"] = "bf16"
    elif layout.variant.precision == AMP:
        found[AMP] = {}
    if layout.variant.remat:
        found[REMAT] = {}
    return found


class Combining:
    """Whether plugins of layouts combine with each other and with the other plugins of a recipe."""

    def __init__(self, recipe: Mapping[str, Mapping[str, Any]]):
        self._recipe = recipe
        self._found: dict[object, str] = {}
        self.left_out: dict[str, None] = {}
        "Why layouts were refused that would be accepted without the recipe's other plugins."

    def accepts(self, layout: Layout) -> bool:
        """Return whether a trainer with the recipe's other plugins trains so."""
        others = {name: own for name, own in self._recipe.items() if name not in APART or name in KEPT}
        if not self._refusal(layout, others):
            return True
        if not self._refusal(layout, {}):
            self.left_out[self._refusal(layout, others)] = None
        return False

    def _refusal(self, layout: Layout, others: Mapping[str, Mapping[str, Any]]) -> str:
        """Return why a trainer refuses; empty if it accepts."""
        chosen = plugins_of(layout)
        key = layout.data, tuple(chosen), tuple(layout.mesh), len(others)
        if key not in self._found:
            self._found[key] = ""
            given = {name: {**self._recipe.get(name, {}), **own} for name, own in chosen.items()}
            if "tensor_parallel" in given:
                given["tensor_parallel"] = UNSAID | given["tensor_parallel"]
            try:
                stack = Stack(make_plugins({**others, **given}))
                stack.resolve()
                axes.refuse_unowned(layout.mesh, stack.plugins)
            except StackError as error:
                self._found[key] = str(error)
        return self._found[key]
