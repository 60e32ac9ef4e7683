"""Which plugins of a stack a trial run leaves out: those that save, stop or observe it."""

from __future__ import annotations

from forge.contract.plugin import Plugin

LEFT_OUT = frozenset({"anomaly", "autotune", "checkpoint", "early_stop", "guard"})
"""What plugins that save or stop a run, or run trials of their own, provide."""


def is_left_out(plugin: Plugin, *also: str) -> bool:
    """Return whether a trial leaves a plugin out; `also`: provisions besides LEFT_OUT.

    One that builds loaders stays: it takes memory and time.
    """
    only_looks = plugin.observer and getattr(plugin, "forge_build_loader", None) is None
    saves = getattr(plugin, "forge_save", None) is not None
    return only_looks or saves or not LEFT_OUT.union(also).isdisjoint(plugin.provides)
