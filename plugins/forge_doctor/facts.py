"""Facts: what a run consists of, a line each, for whoever decides whether it may be long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.utils.data import RandomSampler

from forge.contract.run import Run
from forge.contract.task import defines
from forge.torch_internals import BatchNorm
from forge_doctor.patient import Patient, numbers
from forge_doctor.probes.graph import DROPOUTS

NOTICES = {
    "non_finite": "a value that is not finite, by {}",
    "endless": "a run that gets no better or takes too long, by {}",
    "checkpoints": "a process that is killed goes on from what {} kept",
    "strategy": "a rank that fails or hangs, by {}",
}
"""What a plugin that provides or cures this does about failures."""


def facts_of(trainer: Run, patient: Patient) -> dict[str, str]:
    """Return the facts of a run, by what they are about."""
    return {
        "the data": "; ".join(_data(name, loader) for name, loader in patient.sources.items() if loader is not None),
        "model and loss": _model(patient),
        "optimizer and schedule": ", ".join(_optimizer(trainer)),
        "what a checkpoint holds": _held(trainer),
        "how validation differs": "; ".join(_differs(patient)) or "in nothing that was seen",
        "how a failure is noticed": "; ".join(_notices(patient.plugins)) or "by nothing in this stack",
    }


def _data(name: str, loader: Any) -> str:
    """One loader: its samples, its batches, its order."""
    dataset: Any = getattr(loader, "dataset", None)
    size = getattr(loader, "batch_size", None)
    count = len(dataset) if hasattr(dataset, "__len__") else getattr(loader, "samples", None)
    found = [f"{count:,} samples" if count else "samples without a number", f"batches of {size}" if size else ""]
    is_shuffled = isinstance(getattr(loader, "sampler", None), RandomSampler) or getattr(loader, "shuffle", False)
    return f"{name}: " + ", ".join([*filter(None, found), "shuffled" if is_shuffled else "in one order"])


def _model(patient: Patient) -> str:
    """The size of the model, and the loss with its first value."""
    weights = list(patient.task.parameters())
    trained = sum(p.numel() for p in weights if p.requires_grad)
    calls = _named(call.name for call in patient.watched.losses) or "a loss of its own"
    first = f", {patient.losses[0]:.4g} at first" if patient.losses else ""
    count = sum(p.numel() for p in weights)
    return f"{type(patient.task).__name__}, {count:,} weights, {trained:,} trained; {calls}{first}"


def _optimizer(trainer: Run) -> Iterable[str]:
    for name, entry in trainer.optimizers.entries.items():
        groups = entry.optimizer.param_groups
        rates = " and ".join(dict.fromkeys(f"{float(group.get('initial_lr', group['lr'])):g}" for group in groups))
        decays = " and ".join(dict.fromkeys(f"{float(group.get('weight_decay') or 0):g}" for group in groups))
        plans = _named(type(scheduled.schedule).__name__ for scheduled in entry.schedules) or "no schedule"
        yield f"{f'{name}: ' if name else ''}{type(entry.optimizer).__name__}, rate {rates}, decay {decays}, {plans}"


def _held(trainer: Run) -> str:
    """What a checkpoint of this run has beside the weights."""
    plugins = [name for name, _ in trainer.stack.implementations("forge_state_dict")]
    found = [f"{len(trainer.task.state_dict())} tensors of the model", "optimizer", "counters", "place in the data"]
    return ", ".join([*found, "random numbers", *(f"the state of {name}" for name in plugins)])


def _differs(patient: Patient) -> Iterable[str]:
    """What validation does otherwise than training."""
    if not patient.can_validate:
        yield "there is none"
        return
    layers = Counter("dropout" if isinstance(m, DROPOUTS) else "norms" for m in _modal(patient))
    if layers["dropout"]:
        yield f"{layers['dropout']} layers of dropout are off"
    if layers["norms"]:
        yield f"{layers['norms']} layers of batch normalisation take the statistics of training"
    transforms = [_transform(loader) for loader in patient.loaders.values()]
    if transforms[0] != transforms[1]:
        yield f"samples are prepared by {transforms[1] or 'nothing'}, in training by {transforms[0] or 'nothing'}"
    said = numbers(patient.run(patient.clone().eval(), patient.val_batches[0], "val"))
    if metrics := [name for name in said if name != "loss"]:
        yield f"it tells {', '.join(metrics)}"
    if not defines(patient.task, "validation_step"):
        yield "the step is that of training"


def _modal(patient: Patient) -> Iterable[Any]:
    """The layers that do something else in training."""
    for module in patient.task.modules():
        drops = isinstance(module, DROPOUTS) and module.p > 0
        if drops or (isinstance(module, BatchNorm) and module.track_running_stats):
            yield module


def _transform(loader: Any) -> str:
    found = getattr(getattr(loader, "dataset", None), "transform", None) or getattr(loader, "transform", None)
    return " ".join(repr(found).split()) if found is not None else ""


def _notices(plugins: Iterable[Any]) -> Iterable[str]:
    for plugin in plugins:
        yield from (NOTICES[what].format(plugin.name) for what in (*plugin.provides, *plugin.cures) if what in NOTICES)


def _named(kinds: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(kinds))
