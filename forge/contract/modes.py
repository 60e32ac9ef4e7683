"""Which modules of a task are trained in evaluation mode: those that the task put there, and that train nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

Asleep = Mapping[int, nn.Module]
"""Modules by id; some kinds have no hash."""


def asleep(task: nn.Module) -> Asleep:
    """Return the modules in evaluation mode."""
    return {id(module): module for module in task.modules() if not module.training}


def staying(task: nn.Module, slept: Asleep, trained: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Return those of the modules that slept which hold none of the trained parameters, outer ones first.

    One without any parameters goes with the module around it, if that slept and is trained: it was put to sleep as a
    part of it, like the dropout of a pretrained network.
    """
    ids, seen = {id(parameter) for parameter in trained}, set[int]()

    def walk(module: nn.Module, woken: bool) -> Iterator[nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        held = [id(parameter) in ids for parameter in module.parameters()]
        stays = id(module) in slept and not any(held) and not (woken and not held)
        if stays:
            yield module
        for child in module.children():
            yield from walk(child, woken=id(module) in slept and not stays)

    return list(walk(task, woken=False)) if slept else []


def rest(task: nn.Module, slept: Asleep, trained: Iterable[nn.Parameter]) -> None:
    """Put what stays in evaluation mode back there."""
    for module in staying(task, slept, trained):
        module.training = False


def woken(task: nn.Module, slept: Asleep) -> list[str]:
    """Return the outermost modules that slept and are in training mode now, by name."""
    names: list[str] = []
    for name, module in task.named_modules():
        if id(module) in slept and module.training and not any(not out or name.startswith(f"{out}.") for out in names):
            names.append(name)
    return [name or type(task).__name__ for name in names]
