"""Clusters: memory and time of every strategy on many GPUs, the best three, and what failures cost.

`count_workload` runs dry a task; `Model` predicts the time of a `Layout`, `memory_of` its memory; `plan_cluster`
compares all of them. Nothing here needs a GPU or joins a process group.
"""

from forge_cluster.planning.calibration import calibrated_cluster
from forge_cluster.planning.failures import ExpectedGoodput, goodput
from forge_cluster.planning.hardware import Cluster, Link, MeasuredStep, load_cluster, read_cluster
from forge_cluster.planning.layouts import Layout, layouts
from forge_cluster.planning.memory import memory_of, reserved_of
from forge_cluster.planning.ranking import ClusterPlan, Prediction, plan_cluster
from forge_cluster.planning.timing import Model, UpdateTiming
from forge_cluster.planning.workload import Variant, Workload, count_workload

__all__ = [
    "Cluster",
    "ClusterPlan",
    "ExpectedGoodput",
    "Layout",
    "Link",
    "MeasuredStep",
    "Model",
    "Prediction",
    "UpdateTiming",
    "Variant",
    "Workload",
    "calibrated_cluster",
    "count_workload",
    "goodput",
    "layouts",
    "load_cluster",
    "memory_of",
    "plan_cluster",
    "read_cluster",
    "reserved_of",
]
