"""Probes of the graph of the first losses: what it reaches, and what a step changes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge.torch_internals import BatchNorm, writes
from forge.util.walk import is_librarys
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, NotApplicable, Patient, named, parameters, tensors

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def reach(patient: Patient) -> Iterator[Finding]:
    """Parameters that the loss reaches and torch does not know, and the other way round."""
    task = patient.clone()
    graphs = Graphs(task)
    with graphs.watching():
        for number, batch in enumerate(2 * patient.batches):  # layers that are dropped at random come in some of them
            for name in patient.names:
                graphs.add(patient.loss(task, batch, name, seed=number), batch)
    yield from graphs.unregistered()
    yield from graphs.unreached(trained(patient))
    yield from graphs.outside(trained(patient))


class Graphs:
    """What several losses of a task reach, and which of its modules have run."""

    def __init__(self, task: nn.Module):
        self.task = task
        self.reached: set[int] = set()
        self.hidden: dict[int, Tensor] = {}
        "Parameters that the losses reach and the task does not have."
        self.called: dict[str, None] = {}
        "Modules that have run, in this order."
        self.without: set[str] = set()
        "Modules that ran without a graph alone."

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the modules that run."""
        with_graph: set[str] = set()

        def hook(path: str) -> Any:
            def note(module: nn.Module, args: Any, output: Any) -> None:
                self.called[path] = None
                (with_graph if torch.is_grad_enabled() else self.without).add(path)

            return note

        handles = [module.register_forward_hook(hook(path)) for path, module in self.task.named_modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.without -= with_graph

    def add(self, loss: Tensor, batch: Any) -> None:
        known = {id(p) for p in self.task.parameters()} | {id(x) for x in tensors(batch)}
        for leaf in leaves(loss):
            self.reached.add(id(leaf))
            if id(leaf) not in known and isinstance(leaf, nn.Parameter):
                self.hidden[id(leaf)] = leaf

    def unregistered(self) -> Iterator[Finding]:
        if self.hidden:
            shapes = [str(tuple(leaf.shape)) for leaf in self.hidden.values()]
            kind = type(self.task).__name__
            text = (
                f"The loss depends on {len(self.hidden)} parameters that {kind}.named_parameters() does not have, of "
                f"shapes {named(shapes)}: no optimizer, device move or checkpoint sees them."
            )
            yield Finding("unregistered_parameters", text, kind, {"parameters": len(self.hidden), "shapes": shapes[:8]})

    def unreached(self, trained: set[str]) -> Iterator[Finding]:
        """Parameters that optimizers have and no loss reaches."""
        mine = {name: name.rpartition(".")[0] for name in parameters(self.task) if name in trained}
        missing = {
            name: path
            for name, path in mine.items()
            if id(self.task.get_parameter(name)) not in self.reached and not self._lends(name)
        }
        cut = [name for name, path in missing.items() if path in self.called and path in self.without]
        lost = [name for name, path in missing.items() if path in self.called and path not in self.without]
        idle = [name for name, path in missing.items() if path not in self.called]
        if cut:
            text = (
                f"{len(cut)} parameters that the optimizer has are used without a gradient: {named(cut)}. Their "
                "modules run under torch.no_grad()."
            )
            yield Finding("no_gradient", text, cut[0], {"parameters": cut[:8]})
        if lost:
            text = f"{len(lost)} parameters take part in forward, and no loss reaches them: {named(lost)}."
            spare = [_is_of_a_package(self.task, name) or self._is_added(name) for name in lost]
            level = "note" if all(spare) else "warning"
            yield Finding("no_gradient", text, lost[0], {"parameters": lost[:8]}, level=level)
        if idle:
            spare = [_is_of_a_package(self.task, n) or _is_one_of_several(self.task, n, self.called) for n in idle]
            kind = "unused_module" if all(spare) else "unused_parameters"
            text = f"{len(idle)} trainable parameters are never used: {named(idle)}."
            yield Finding(kind, text, idle[0], {"parameters": idle[:8]})

    def _is_added(self, name: str) -> bool:
        """Whether another parameter of the same module is reached: a loss of slopes, as of an energy, has no use for
        what is only added."""
        module = self.task.get_submodule(name.rpartition(".")[0])
        return any(id(p) in self.reached for p in module.parameters(recurse=False))

    def _lends(self, name: str) -> bool:
        """Whether the module around a parameter never runs, and another of its parameters is used: a tied weight."""
        path = name.rpartition(".")[0]
        own = self.task.get_submodule(path).parameters(recurse=False)
        return path not in self.called and any(id(p) in self.reached for p in own)

    def outside(self, trained: set[str]) -> Iterator[Finding]:
        """Parameters that a loss reaches and no optimizer has."""
        reached = [name for name, p in parameters(self.task).items() if id(p) in self.reached]
        outside = [name for name in reached if name not in trained]
        if outside:
            text = f"{len(outside)} trainable parameters get a gradient but are in no optimizer: {named(outside)}."
            yield Finding("not_in_optimizer", text, outside[0], {"parameters": outside[:8]})


def _is_of_a_package(task: nn.Module, name: str) -> bool:
    """Whether the module around a parameter is a model of an installed package, which may have outputs to spare."""
    while name:
        name = name.rpartition(".")[0]
        module = task.get_submodule(name)
        if not type(module).__module__.startswith("torch.nn"):
            return is_librarys(module)
    return False


def _is_one_of_several(task: nn.Module, name: str, called: Collection[str]) -> bool:
    """Whether a module stands in a list in which others run: an expert that no sample was sent to."""
    while name:
        name = name.rpartition(".")[0]
        around = name.rpartition(".")[0]
        if name and isinstance(task.get_submodule(around), nn.ModuleList):
            return any(path.startswith(f"{around}.") for path in called)
    return False


def trained(patient: Patient, name: str | None = None) -> set[str]:
    """The names of the parameters that optimizers have, or the one of this name."""
    mine = {id(p): path for path, p in patient.trainer.task.named_parameters()}
    return {mine[id(p)] for p in patient.trainer.optimizers.parameters(name) if id(p) in mine}


def leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors at which a graph ends."""
    for node in nodes(loss):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable


def nodes(loss: Tensor) -> Iterator[Any]:
    """All nodes of a graph."""
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(child for child, _ in node.next_functions)


def purity(patient: Patient) -> Iterator[Finding]:
    """What a step does besides returning a loss."""
    for stage, (batch, *_) in patient.stages:
        task = patient.clone() if stage == "train" else patient.clone().eval()
        traces = Traces(task, given := copy.deepcopy(batch), stage)
        with torch.set_grad_enabled(stage == "train"):
            patient.run(task, given, stage, seed=SEED + 1)  # earlier steps may have changed the batch by the same draws
        traces.look_again()
        yield from traces.found()


class Traces:
    """The modes, the gradients and the batch before a step, to be compared with those after it.

    `cheaply`: by the counters of torch's own in-place operations instead of copies of the batch.
    """

    def __init__(self, task: nn.Module, batch: Any, stage: str = "train", cheaply: bool = False):
        self.task, self.batch = task, batch
        self.where = f"{type(task).__name__}.{'training_step' if stage == 'train' else 'validation_step'}"
        self._modes = {path: module.training for path, module in task.named_modules()}
        self._values = [writes(x) if cheaply else x.clone() for x in tensors(batch)]
        self._has_gradients = any(p.grad is not None for p in task.parameters())
        self.calls_backward, self.modes, self.rows = False, self._modes, list[int]()

    def look_again(self) -> None:
        """Note what is there after the step, before the backward of the Trainer."""
        self.calls_backward = not self._has_gradients and any(p.grad is not None for p in self.task.parameters())
        self.modes = {path: module.training for path, module in self.task.named_modules()}
        pairs = zip(tensors(self.batch), self._values, strict=True)
        self.rows = [i for i, (x, y) in enumerate(pairs) if not _equal(x, y)]

    def found(self) -> Iterator[Finding]:
        where, rows = self.where, self.rows
        if self.calls_backward:
            text = f"{where} calls backward(): gradients are there before the Trainer's own."
            yield Finding("backward_in_step", text, where)
        changed = [
            path or "the task"
            for path, mode in self.modes.items()
            if self._modes.get(path, mode) != mode and _is_trained(self.task, path)  # a teacher may be set to eval()
        ]
        if changed:
            text = f"{where} changes the mode of {len(changed)} modules, of {named(changed)}, for all later steps."
            yield Finding("mode_changed", text, where, {"modules": changed[:8]})
        if rows:
            text = (
                f"{where} changes its batch in place: tensor {rows[0]} of the batch is another afterwards. A dataset "
                "in memory is changed with it."
            )
            yield Finding("batch_changed", text, where, {"tensors": rows})


def _equal(x: Tensor, y: Tensor | int) -> bool:
    if isinstance(y, int):
        return writes(x) == y
    return x.shape == y.shape and bool(torch.equal(x.nan_to_num(), y.nan_to_num()))


def validation_modes(patient: Patient) -> Iterator[Finding]:
    """Modules that validate in training mode."""
    if not patient.can_validate:
        raise NotApplicable
    task = patient.clone().eval()
    with awake_layers(task) as awake, torch.no_grad():
        patient.run(task, patient.val_batches[0], "val")
    yield from on_in_validation(awake)


@contextmanager
def awake_layers(task: nn.Module) -> Iterator[dict[str, None]]:
    """Note the layers that run in training mode and do something else there: dropout, normalisation by batches."""
    awake: dict[str, None] = {}

    def hook(path: str) -> Any:
        def note(module: Any, args: Any) -> None:
            if module.training and (module.p > 0 if isinstance(module, DROPOUTS) else module.running_mean is not None):
                awake[path] = None

        return note

    layers = [(path, m) for path, m in task.named_modules() if isinstance(m, (BatchNorm, *DROPOUTS))]
    handles = [module.register_forward_pre_hook(hook(path)) for path, module in layers]
    try:
        yield awake
    finally:
        for handle in handles:
            handle.remove()


def on_in_validation(awake: dict[str, None]) -> Iterator[Finding]:
    if wrong := list(awake):
        text = f"{len(wrong)} modules run in training mode while validating: {named(wrong)}."
        yield Finding("validated_in_train_mode", text, wrong[0], {"modules": wrong[:8]})


def _is_trained(task: nn.Module, path: str) -> bool:
    """Whether a module, or for one without parameters the module around it, has parameters that train."""
    module: nn.Module = task.get_submodule(path)
    while not any(True for _ in module.parameters()) and path:
        path = path.rpartition(".")[0]
        module = task.get_submodule(path)
    return any(p.requires_grad for p in module.parameters(recurse=True))
