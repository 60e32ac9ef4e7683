"""Interface: what a trained task takes and returns, as seen in a validation; and the module that is exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from forge.contract.task import TaskModule, defines
from forge.engine.trainer import Trainer
from forge.errors import TaskError
from forge_ship.engine import Engine, ExportError, Port
from forge_ship.structure import Rebuild, flat, outputs_of, plain, structure_of, take_apart, take_call_apart

KEPT = 12
"""Calls that are kept for the comparison: the first ones, and those of other sizes."""


@dataclass
class SeenCall:
    """One call of the method that is exported."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(tensor.shape) for tensor in self.inputs.values())


@dataclass
class Interface:
    """The method of a task that is exported, and calls of it that were seen."""

    method: str
    calls: list[SeenCall]
    rebuild: Callable[[Iterator[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    metrics: dict[str, float]
    "Of the validation in which the calls were seen."
    counted: int
    "Calls during that validation."
    rebuild_output: Rebuild
    "Makes what the method returns of flat tensors."
    left_out: Sequence[str] = ()
    "Outputs that are no tensors."
    returns: Any = "tensor"
    "The structure of what the method returns, by `structure_of`."

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.calls[0].inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(self.calls[0].outputs)


class Deployed(nn.Module):
    """What is exported: a task's method over plain tensors, behind its `preprocess` where there is one."""

    def __init__(self, task: TaskModule, interface: Interface, arrange: Callable[[Any], Any] = flat):
        super().__init__()
        self.task = task
        self._method, self._rebuild, self._arrange = interface.method, interface.rebuild, arrange

    def forward(self, *inputs: Tensor) -> Any:
        args, kwargs = self._rebuild(iter(inputs))
        preprocess = preprocess_of(self.task)
        if preprocess is not None:
            args = (preprocess(args[0]), *args[1:])
        return self._arrange(getattr(self.task, self._method)(*args, **kwargs))


def preprocess_of(task: nn.Module) -> nn.Module | None:
    """Return the module that a task applies to its first input before `forward`."""
    found = getattr(task, "preprocess", None)
    return found if isinstance(found, nn.Module) else None


def method_of(task: TaskModule) -> str:
    """Return the name of the method to export: `task.export_method`, else `forward`."""
    named = getattr(task, "export_method", None)
    if named is not None:
        if not callable(getattr(task, named, None)):
            raise ExportError(f"{type(task).__name__}.export_method is {named!r}, but the task has no such method.")
        return named
    if type(task).forward is not nn.Module.forward or "forward" in vars(task):
        return "forward"
    raise ExportError(
        f"{type(task).__name__} has no forward, so there is nothing to export. Add the method "
        "that maps inputs to outputs:\n    def forward(self, images):\n        return self.net(images)\n"
        'and call self(images) in the steps; or name another method with export_method = "encode".'
    )


def observe(task: TaskModule, loader: Any, device: str, batches: int | None = None) -> Interface:
    """Validate a task, and keep what its method takes and returns meanwhile."""
    method = method_of(task)
    seen = _Seen(task, method)
    with seen.listening():
        metrics = validate(task, loader, device, batches)
        counted = seen.counted
        if not seen.calls:  # a validation that does not use the method: predict does
            _predict(task, loader, device)
    if not seen.calls or seen.rebuild is None:
        raise ExportError(
            f"Neither validation_step nor predict_step of {type(task).__name__} calls {method}, so its inputs are "
            f"unknown. Call self(...) in one of them."
        )
    if not seen.calls[0].outputs:
        raise ExportError(f"{type(task).__name__}.{method} returns no tensor, so there is nothing to export.")
    if preprocess_of(task) is not None and not seen.preprocessed:
        raise ExportError(
            f"{type(task).__name__}.preprocess goes into the export, but the steps do not call it, so what it takes is "
            "unknown. Call self(self.preprocess(images)) in validation_step, or give the module another name."
        )
    returns = structure_of(plain(seen.output))
    return Interface(method, seen.calls, seen.rebuild, metrics, counted, seen.rebuild_output, seen.left_out, returns)


def validate(task: TaskModule, loader: Any, device: str, batches: int | None = None) -> dict[str, float]:
    """Return a task's validation metrics that are numbers; none for a task without validation_step."""
    if not defines(task, "validation_step"):
        return {}
    trainer = Trainer(plugins=[], run_dir=False, device=device, seed=None)
    found = trainer.validate(task, _first(loader, batches))
    task.eval()
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}


def _predict(task: TaskModule, loader: Any, device: str) -> None:
    if isinstance(loader, Mapping):
        loader = next(iter(loader.values()))
    trainer = Trainer(plugins=[], run_dir=False, device=device, seed=None)
    try:
        trainer.predict(task, _first(loader, KEPT))
    except (TaskError, NotImplementedError):
        return
    finally:
        task.eval()


def _first(loader: Any, batches: int | None) -> Any:
    if batches is None:
        return loader
    if isinstance(loader, Mapping):
        return {name: list(islice(each, batches)) for name, each in loader.items()}
    return list(islice(loader, batches))


class _Seen:
    """Calls of one method of a task."""

    def __init__(self, task: TaskModule, method: str):
        self.task, self.method = task, method
        self.calls: list[SeenCall] = []
        self.counted = 0
        self.rebuild: Any = None
        self.rebuild_output: Any = None
        self.output: Any = None
        self.preprocessed = False
        self.left_out: list[str] = []
        self._form: Any = None
        self._raw: Any = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        real = getattr(self.task, self.method)
        preprocess = preprocess_of(self.task)
        hook = preprocess.register_forward_pre_hook(self._keep_raw) if preprocess is not None else None

        def spy(*args: Any, **kwargs: Any) -> Any:
            outputs = real(*args, **kwargs)
            self._keep(real, args, kwargs, outputs)
            return outputs

        with replaced(self.task, self.method, spy):
            try:
                yield
            finally:
                if hook is not None:
                    hook.remove()

    def _keep_raw(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._raw = args[0]

    def _keep(self, real: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:
        self.counted += 1
        if self._raw is not None:  # what preprocess got: the exported model begins there
            args, self._raw, self.preprocessed = (self._raw, *args[1:]), None, True
        tensors, rebuild, form = take_call_apart(real, args, kwargs)
        self._form = form if self._form is None else self._form
        found, left_out = outputs_of(outputs)
        call = SeenCall(_copied(tensors), _copied(found))
        if form != self._form or (self.calls and call.outputs.keys() != self.calls[0].outputs.keys()):
            return  # called in another way, which is another model
        if self.rebuild is None:
            self.rebuild, self.left_out, self.output = rebuild, left_out, outputs
            self.rebuild_output = take_apart(outputs, "output")[1]
        if len(self.calls) < KEPT // 2 or (len(self.calls) < KEPT and call.sizes not in {c.sizes for c in self.calls}):
            self.calls.append(call)


@contextmanager
def computed_by(task: TaskModule, interface: Interface, engine: Engine) -> Iterator[list[int]]:
    """Have an engine compute what the task's method computes, in calls of the form that was exported; count them."""
    real = getattr(task, interface.method)
    counted = [0]

    def method(*args: Any, **kwargs: Any) -> Any:
        tensors, _, _ = take_call_apart(real, args, kwargs)
        if tuple(tensors) != interface.names:
            return real(*args, **kwargs)
        counted[0] += 1
        device = next(iter(tensors.values())).device
        outputs = engine(tensors)
        return interface.rebuild_output(iter([outputs[name].to(device) for name in interface.output_names]))

    preprocess = preprocess_of(task)
    with ExitStack() as stack:
        if preprocess is not None:  # it is in the exported model
            stack.enter_context(replaced(preprocess, "forward", lambda inputs: inputs))
        stack.enter_context(replaced(task, interface.method, method))
        yield counted


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.inference_mode(False):  # what is cloned in a validation's inference mode cannot be traced
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of one object for a while."""
    had, before = name in vars(owner), vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if had:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)


# -- dynamic axes -----------------------------------------------------------------------------------------------------


def ports_of(tensors: Iterable[Mapping[str, Tensor]], axes: Mapping[str, Mapping[int, str]]) -> list[Port]:
    """Describe tensors by name, dtype and shape; axes that are dynamic have names."""
    seen = list(tensors)
    ports: list[Port] = []
    for name, first in seen[0].items():
        shape = tuple(axes.get(name, {}).get(axis, size) for axis, size in enumerate(first.shape))
        ranges = {
            symbol: (min(s), max(s))
            for axis, symbol in axes.get(name, {}).items()
            if (s := [each[name].shape[axis] for each in seen])
        }
        ports.append(Port(name, str(first.dtype).removeprefix("torch."), shape, ranges or None))
    return ports


def dynamic_axes(calls: Sequence[SeenCall], dynamic: str | Sequence[str] = "auto") -> dict[str, dict[int, str]]:
    """Return the names of dynamic axes by input: the batch, and with "auto" each axis whose size the data vary.

    `dynamic` is "auto", "batch", "none", or a list of INPUT:AXIS in addition to the batch.
    """
    first = calls[0].inputs
    for name, tensor in first.items():
        if any(call.inputs[name].dim() != tensor.dim() for call in calls):
            raise ExportError(f"{name} has {tensor.dim()} axes in one batch and another number in others.")
    if dynamic == "none" or not first:
        return {}
    axes: dict[str, dict[int, str]] = {name: {} for name in first}
    batch = _sizes(calls, next(iter(first)), 0) if next(iter(first.values())).dim() else []
    for name, tensor in first.items():
        if tensor.dim() and _sizes(calls, name, 0) == batch:
            axes[name][0] = "batch"
    asked = _asked(dynamic, first)
    symbols: dict[tuple[int, ...], str] = {}
    for name, tensor in first.items():
        for axis in range(tensor.dim()):
            sizes = _sizes(calls, name, axis)
            varies = dynamic == "auto" and len(set(sizes)) > 1
            if axis in axes[name] or not (varies or (name, axis) in asked):
                continue
            if tuple(sizes) == tuple(batch):
                axes[name][axis] = "batch"
            else:
                axes[name][axis] = symbols.setdefault(tuple(sizes), f"{name}_{axis}")
    return {name: found for name, found in axes.items() if found}


def _asked(dynamic: str | Sequence[str], inputs: Mapping[str, Tensor]) -> set[tuple[str, int]]:
    words = [dynamic] if isinstance(dynamic, str) else list(dynamic)
    found: set[tuple[str, int]] = set()
    for word in words:
        if word in ("auto", "batch"):
            continue
        name, _, axis = word.rpartition(":")
        if name not in inputs or not axis.isdigit() or int(axis) >= inputs[name].dim():
            known = ", ".join(f"{name} ({tensor.dim()} axes)" for name, tensor in inputs.items())
            raise ExportError(f"dynamic {word!r}: give auto, batch, none, or INPUT:AXIS as in x:1. Inputs: {known}.")
        found.add((name, int(axis)))
    return found


def _sizes(calls: Sequence[SeenCall], name: str, axis: int) -> list[int]:
    return [call.inputs[name].shape[axis] for call in calls]


def with_batch(call: SeenCall, axes: Mapping[str, Mapping[int, str]], rows: int) -> dict[str, Tensor]:
    """Return a call's inputs cut or repeated to a number of rows."""
    changed: dict[str, Tensor] = {}
    for name, tensor in call.inputs.items():
        for axis, symbol in axes.get(name, {}).items():
            if symbol == "batch":
                repeats = -(-rows // max(1, tensor.shape[axis]))
                tensor = torch.cat([tensor] * repeats, axis) if repeats > 1 else tensor
                tensor = tensor.narrow(axis, 0, rows)
        changed[name] = tensor.contiguous()
    return changed
