"""Which plugins of a stack a trial run leaves out: those that save, stop or observe it."""

from __future__ import annotations

from forge.contract.plugin import Plugin

SCHEDULE = "schedule"
"""What plugins that change learning rates provide: a trial sets its own."""


def is_left_out(plugin: Plugin, *also: str) -> bool:
    """Return whether a trial leaves a plugin out; `also`: if it provides one of these things.

    One that builds loaders stays: it takes memory and time. What makes requests, at the boundary, or ends the run goes:
    a trial has a length of its own.
    """
    only_looks = plugin.observer and not _implements(plugin, "forge_build_loader")
    saves = _implements(plugin, "forge_save")
    stops = _implements(plugin, "forge_boundary") or "endless" in plugin.cures
    return only_looks or saves or stops or not set(also).isdisjoint(plugin.provides)


def _implements(plugin: Plugin, hook: str) -> bool:
    return getattr(plugin, hook, None) is not None
