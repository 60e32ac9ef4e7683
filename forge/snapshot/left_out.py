"""Which plugins of a stack a trial run leaves out: those that save, stop or observe it."""

from __future__ import annotations

from forge.contract.plugin import Plugin

SCHEDULE = "schedule"
"""What plugins that change learning rates provide: a trial sets its own."""


def is_left_out(plugin: Plugin, *also: str) -> bool:
    """Return whether a trial leaves a plugin out; `also`: if it provides one of these things.

    One that builds loaders stays: it takes memory and time.
    """
    only_looks = plugin.observer and getattr(plugin, "forge_build_loader", None) is None
    saves = getattr(plugin, "forge_save", None) is not None
    return only_looks or saves or not plugin.in_trials or not set(also).isdisjoint(plugin.provides)
