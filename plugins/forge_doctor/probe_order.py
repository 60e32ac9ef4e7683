"""The probes of forge and of other packages, in the order in which an examination makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from forge import registry
from forge_doctor import in_fit
from forge_doctor.experiments import (
    equivariance,
    held_out,
    influence,
    motion,
    pairs,
    reachable,
    stages,
    values,
)
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient
from forge_doctor.probes import (
    aliases,
    class_labels,
    data,
    graph,
    losses,
    measures,
    serving,
    start,
)

BEFORE: dict[str, Callable[[Patient], Iterator[Finding]]] = {
    "what the loss reaches": graph.reach,
    "what a step changes": graph.purity,
    "modes while validating": graph.validation_modes,
    "inputs of losses": losses.inputs,
    "labels as numbers": in_fit.class_targets,
    "dimensions of metrics": losses.evaluation_inputs,
    "reduction of the loss": losses.reduction,
    "samples apart": equivariance.samples,
    "answers that are seen": equivariance.answers_seen,
    "steps ahead": equivariance.steps_ahead,
    "values that are not finite": values.finite,
    "copies of samples": data.copies,
    "train against val": data.splits,
    "class labels": class_labels.labels,
    "influence of weights": influence.weights,
    "batch after batch": equivariance.state,
    "bounds of the loss": reachable.bounds,
    "metrics of the best answers": reachable.metrics,
    "whole and parts": stages.whole_and_parts,
    "values that are unseen": values.unseen,
    "pairs follow": pairs.follow,
    "samples of val": pairs.fixed,
    "evaluation twice as a whole": stages.evaluated_twice,
    "layout of pictures": values.layout,
    "draws of two steps": stages.same_draws,
    "samples that an epoch draws": values.coverage,
    "order of an epoch": values.order,
    "weights of classes": losses.weights,
    "less padding": equivariance.cropped,
    "repeated modules": aliases.repeated,
    "options of losses": losses.options,
    "evaluation twice": stages.drawn,
    "scales of the data": data.scales,
    "scales of targets": data.targets,
    "windows in both splits": data.overlaps,
    "samples that are left out": data.dropped,
    "noise of the samples": serving.noise,
    "activations": start.activations,
    "layers": start.layers,
    "names of attributes": aliases.attributes,
    "memory of parameters": aliases.shared_storage,
    "options of the optimizer": start.optimizer,
    "rehearsal of the schedule": start.schedules,
    "directions of metrics": measures.modes,
    "plan of validations": measures.validation,
    "names of methods": start.methods,
}
"""Probes of the task as it is, in this order; then those that packages offer by the entry point `forge.probes`."""

AFTER: dict[str, Callable[[Patient], Iterator[Finding]]] = {
    "weights that stand still": motion.still,
    "averages of weights": motion.averages,
    "influence of weights, later": influence.later_weights,
    "influence of the batch": influence.inputs,
    "influence of parts": influence.slices,
    "inputs are read": influence.unread,
    "rows of weights": start.equal_rows,
    "size of updates": motion.rates,
    "gradients by layer": motion.gradients,
    "clipping": motion.clipping,
    "losses of the first updates": motion.losses,
}
"""Probes after a few updates."""

LAST: dict[str, Callable[[Patient], Iterator[Finding]]] = {
    "from train to val": held_out.generalises,
}
"""Experiments that train copies, after the run."""


def offered() -> dict[str, Any]:
    """The probes of other packages by what they are called here: one that has the name of ours is named with its
    package, and both run."""
    ours = BEFORE | AFTER | LAST
    found = registry.installed("probe").items()
    return {f"{name} ({registry.origin(entry)})" if name in ours else name: entry for name, entry in found}
