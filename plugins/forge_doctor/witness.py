"""Witness: record every tensor of a fit in the order of its computation, for `forge determinism`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.run import Run
from forge.contract.step import Step
from forge.rng import RNGState
from forge.snapshot.evidence import unsaved
from forge.torch_internals import pytree
from forge.twin.record import Record
from forge.util.digest import digest
from forge.util.tensors import tensors_in

KINDS = {
    "device": "the device, {},",
    "first parameter": "the initial parameter {}",
    "first buffer": "the initial buffer {}",
    "batch": "the batch ({})",
    "rng before": "the state of {}'s random numbers before the forward pass",
    "output": "the output of {}",
    "loss": "the loss ({})",
    "gradient": "the gradient of {}",
    "parameter": "the parameter {} after the update",
    "buffer": "the buffer {} after the update",
    "optimizer": "the state of {}",
    "rng": "the state of {}'s random numbers after the update",
}
"""The kinds of values that are recorded, with their description. What no checkpoint holds stands aside, as hidden."""


class Witness(Plugin):
    """Mark all tensors of each update in a record; stop the run after `updates`."""

    observer = True

    def __init__(self, record: Record, updates: int):
        super().__init__()
        self.name = "forge_doctor.witness"
        self.record, self.updates = record, updates
        self.arrived: dict[str, None] = {}
        "Parameters in the order in which their gradients arrived."
        self.hooks: list[Any] = []
        self._seen, self._watching = -1, False

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        self.record.mark(trainer.env.device.type, "", update=0, kind="device")
        self._mark_weights(trainer.task, "first ")
        self.record.update = 1
        for name, module in eager_modules(trainer):
            self.hooks.append(module.register_forward_hook(self._saw_output(f"{name} ({type(module).__name__})")))
        for name, parameter in trainer.task.named_parameters():
            if parameter.requires_grad:
                self.hooks.append(parameter.register_post_accumulate_grad_hook(self._saw_gradient(name)))

    @hookimpl(wrapper=True)
    def forge_train_step(self, step: Step) -> Generator[None, Any, Any]:
        if self._seen != step.index:  # with several optimizers this hook is called once for each
            self._seen = step.index
            for place, part in _parts(step.window):
                self.record.mark(place, part, kind="batch")
        self._mark_rng(step.trainer, "rng before")
        self.arrived.clear()
        self._watching = True
        result = yield
        self._watching = False
        return result

    @hookimpl(wrapper=True)
    def forge_backward(self, step: Step, loss: Tensor) -> Generator[None, Any, Any]:
        turn = f"{step.name}, " if step.name else ""
        self.record.mark(f"{turn}micro-batch {step.micro}", loss, kind="loss")
        return (yield)

    @hookimpl
    def forge_inspect_grads(self, step: Step) -> None:
        known = {name: p.grad for name, p in step.trainer.task.named_parameters() if p.grad is not None}
        for name in [*self.arrived, *(name for name in known if name not in self.arrived)]:
            if name in known:
                self.record.mark(name, known[name], kind="gradient")

    @hookimpl
    def forge_boundary(self, trainer: Run) -> None:
        self._mark_weights(trainer.task)
        for name, state in trainer.optimizers.state_dict(trainer.task).items():
            self.record.mark(f"the optimizer {name}" if name else "the optimizer", state, kind="optimizer")
        self._mark_rng(trainer, "rng")
        for path, found in unsaved(trainer):
            self.record.mark(path, found, kind="hidden", aside=True)
        self.record.update = trainer.progress.update + 1
        if trainer.progress.update >= self.updates:
            trainer.request_stop(f"{self.updates} updates were recorded", by=self.name)

    @hookimpl
    def forge_end(self) -> None:
        for handle in self.hooks:
            handle.remove()
        self.hooks = []
        self.record.close()

    def _mark_weights(self, task: nn.Module, when: str = "") -> None:
        for name, parameter in task.named_parameters():
            self.record.mark(name, parameter, kind=f"{when}parameter")
        for name, buffer in task.named_buffers():
            self.record.mark(name, buffer, kind=f"{when}buffer")

    def _mark_rng(self, trainer: Run, kind: str) -> None:
        for source, state in RNGState.capture(trainer.env.device).as_tree().items():
            self.record.mark(source, digest(state), kind=kind)

    def _saw_output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for i, value in enumerate(tensors_in(output) if self._watching else ()):
                self.record.mark(f"{name}[{i}]" if i else name, value, kind="output")

        return hook

    def _saw_gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self.arrived[name] = None

        return hook


def eager_modules(trainer: Run) -> Iterator[tuple[str, nn.Module]]:
    """Yield the task's modules by name, without compiled ones: hooks on these would change the compiled code."""
    shells = [
        module
        for module in trainer.model.modules()
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    ]
    compiled = {id(part) for shell in shells for part in shell.modules()}
    for name, module in trainer.task.named_modules():
        if name and id(module) not in compiled:
            yield name, module


def _parts(window: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of every tensor and other value in every micro-batch."""
    for i, batch in enumerate(window):
        for path, part in pytree.tree_flatten_with_path(batch)[0]:
            yield f"micro-batch {i}{', batch' if path else ''}{pytree.keystr(path)}", part
