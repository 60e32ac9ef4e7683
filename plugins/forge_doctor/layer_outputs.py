"""features: the outputs of named layers while a model runs, collected by forward hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from forge.errors import ForgeError, did_you_mean
from forge.torch_internals import pytree, writes


class Features(Mapping[str, Any]):
    """The outputs of layers by name, in the order in which they ran."""

    def __init__(self, names: Sequence[str], copy: bool, detach: bool):
        self._names, self._copy, self._detach = tuple(names), copy, detach
        self._found: dict[str, Any] = {}
        self._versions: dict[str, list[int]] = {}

    def clear(self) -> None:
        """Forget what was collected, before another batch."""
        self._found.clear()
        self._versions.clear()

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(f"features does not collect {name!r}.{did_you_mean(name, self._names)}")
        if name not in self._found:
            raise KeyError(
                f"{name!r} has not run. Call the model inside `with forge.features(...)`; a model compiled before it "
                "does not call hooks that are added later."
            )
        value = self._found[name]
        if self._versions[name] != _versions(value):
            raise ForgeError(
                f"The output of {name!r} was changed in place after it was collected, as nn.ReLU(inplace=True) does. "
                "Pass copy=True."
            )
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def _keep(self, name: str, output: Any) -> None:
        self._found.pop(name, None)  # the order is that of the last calls
        self._found[name] = kept = pytree.tree_map_only(Tensor, self._kept, output)
        self._versions[name] = _versions(kept)

    def _kept(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach() if self._detach else tensor
        return tensor.clone() if self._copy else tensor


def _versions(value: Any) -> list[int]:
    return [writes(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def features(model: nn.Module, layers: Sequence[str], *, copy: bool = False, detach: bool = True) -> Iterator[Features]:
    """Collect the outputs of layers while a model runs.

    ::

        task = forge.load("runs/fashion_cnn/RUN")
        with torch.no_grad(), forge.features(task, ["body.*", "head"]) as seen:
            task(images)
        seen["head"]

    `layers` are names of `model.named_modules()`, or patterns with `*`. Each call of the model replaces the outputs of
    the one before; a layer that runs several times in a call gives its last output. Tensors are detached, unless
    `detach=False`, with which gradients flow through them. `copy=True` is for layers whose output the next one changes
    in place; without it, reading such an output is an error. The hooks are removed at the end, after an error too.
    """
    if isinstance(layers, str):
        raise ForgeError(f"features takes a list of layers: [{layers!r}].")
    known = {name: module for name, module in model.named_modules() if name}
    chosen: dict[str, nn.Module] = {}
    for wanted in layers:
        found = {name: module for name, module in known.items() if name == wanted or fnmatchcase(name, wanted)}
        if not found:
            raise ForgeError(f"{type(model).__name__} has no layer {wanted!r}.{did_you_mean(wanted, known)}")
        chosen |= found
    seen = Features(list(chosen), copy, detach)
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: seen._keep(name, output))
        for name, module in chosen.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
