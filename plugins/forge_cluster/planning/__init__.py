"""Clusters: memory and time of every strategy on many GPUs, the best three, and what failures cost.

`count_workload` runs dry a task; `Model` predicts the time of a `Layout`, `memory_of` its memory; `plan_cluster`
compares all of them. Nothing here needs a GPU or joins a process group. Names load on first use, so that a cluster that
is not known is refused before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_cluster.planning.calibration import calibrated_cluster
    from forge_cluster.planning.failures import ExpectedGoodput, goodput
    from forge_cluster.planning.hardware import Cluster, Link, MeasuredStep, load_cluster, read_cluster
    from forge_cluster.planning.layouts import Layout, layouts
    from forge_cluster.planning.memory import memory_of, reserved_of
    from forge_cluster.planning.published import PublishedRow, nearest_rows, published_rows, typical_error
    from forge_cluster.planning.ranking import ClusterPlan, Prediction, plan_cluster
    from forge_cluster.planning.timing import Model, UpdateTiming
    from forge_cluster.planning.workload import Variant, Workload, count_workload

_HOME = {
    "Cluster": "hardware",
    "ClusterPlan": "ranking",
    "ExpectedGoodput": "failures",
    "Layout": "layouts",
    "Link": "hardware",
    "MeasuredStep": "hardware",
    "Model": "timing",
    "Prediction": "ranking",
    "PublishedRow": "published",
    "UpdateTiming": "timing",
    "Variant": "workload",
    "Workload": "workload",
    "calibrated_cluster": "calibration",
    "count_workload": "workload",
    "goodput": "failures",
    "layouts": "layouts",
    "load_cluster": "hardware",
    "memory_of": "memory",
    "nearest_rows": "published",
    "plan_cluster": "ranking",
    "published_rows": "published",
    "read_cluster": "hardware",
    "reserved_of": "memory",
    "typical_error": "published",
}

__all__ = [
    "Cluster",
    "ClusterPlan",
    "ExpectedGoodput",
    "Layout",
    "Link",
    "MeasuredStep",
    "Model",
    "Prediction",
    "PublishedRow",
    "UpdateTiming",
    "Variant",
    "Workload",
    "calibrated_cluster",
    "count_workload",
    "goodput",
    "layouts",
    "load_cluster",
    "memory_of",
    "nearest_rows",
    "plan_cluster",
    "published_rows",
    "read_cluster",
    "reserved_of",
    "typical_error",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge_cluster.planning' has no attribute {name!r}")
    return getattr(import_module(f"forge_cluster.planning.{_HOME[name]}"), name)
