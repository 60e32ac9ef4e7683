"""Frozen: the holder of a module that a task uses and neither trains nor saves.

It is no `nn.Module`, so torch stores it as a plain attribute. That is the whole law: what is not a submodule is in no
`parameters()`, no `state_dict()`, no optimizer, average, DDP or FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

CONTAINERS = 3
"""Lists, tuples and dicts inside each other that are searched for holders."""
MAX_ITEMS = 1_000
"""Items of one container that are looked at."""


class WeightsFile(NamedTuple):
    """The file that a frozen module's weights came from."""

    file: str
    sha256: str


class Frozen:
    """Holds a module, and passes calls and attributes on to it. `.module` is the module itself."""

    module: nn.Module
    source: WeightsFile | None
    "Where its weights came from, if `forge.frozen` was given a file."

    def __init__(self, module: nn.Module, source: WeightsFile | None = None):
        vars(self).update(module=module, source=source)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # how to copy or pickle the module is no answer for its holder
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found = getattr(self.module, name)
        if not isinstance(found, MethodType):
            return found

        def method(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return self if result is self.module else result  # `.eval()`, `.to(...)`: still held

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __reduce__(self) -> Any:
        return Frozen, (self.module, self.source)

    def __repr__(self) -> str:
        return f"frozen({self.module!r})"

    def put_back(self, changed: dict[str, Tensor]) -> None:
        """Restore tensors that had changed."""
        self.module.load_state_dict(changed, strict=False)

    def tensors(self) -> dict[str, Tensor]:
        """Return what the module's own `state_dict` has, by name."""
        state = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}


class Base:
    """What a model has beside what it trains: it is in the model, and not in its `state_dict`.

    torch's own hooks leave it out and do not miss it, so all that is saved by `state_dict` follows.
    """

    def __init__(self, model: nn.Module):
        trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self.model, self.names = model, frozenset(model.state_dict()) - trained
        self.source: WeightsFile | None = None
        self._prefix = ""
        model.register_state_dict_post_hook(self)
        model.register_load_state_dict_pre_hook(self._note_prefix)
        model.register_load_state_dict_post_hook(self._miss_nothing)

    @property
    def title(self) -> str:
        """What the model calls itself: the name that `from_pretrained` was given."""
        return str(getattr(getattr(self.model, "config", None), "_name_or_path", "") or "")

    def tensors(self) -> dict[str, Tensor]:
        """Return what is left out, by name."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        named = (*parameters, *self.model.named_buffers(remove_duplicate=False))
        return {name: tensor for name, tensor in named if name in self.names}

    def put_back(self, changed: dict[str, Tensor]) -> None:
        """Restore tensors that had changed."""
        here = self.tensors()
        for name, value in changed.items():
            here[name].data.copy_(value)

    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Leave the base out of a `state_dict`."""
        for name in self.names:
            state.pop(prefix + name, None)

    def _note_prefix(self, model: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        self._prefix = prefix

    def _miss_nothing(self, model: nn.Module, found: Any) -> None:
        missing = {self._prefix + name for name in self.names}
        found.missing_keys[:] = [name for name in found.missing_keys if name not in missing]


BASE = "_frozen_base"
"""The attribute of a model that has a `Base`."""


def kept_by_hash(root: nn.Module) -> dict[str, Frozen | Base]:
    """Return what a checkpoint has by its hash alone, by path: frozen modules, and the bases of adapters."""
    bases = {path: vars(module)[BASE] for path, module in root.named_modules() if BASE in vars(module)}
    return {**frozen_in(root), **bases}


def frozen_in(root: nn.Module) -> dict[str, Frozen]:
    """Return the holders in a tree of modules by path, at any depth: attributes, and items of lists and dicts."""
    found: dict[str, Frozen] = {}
    for path, module in root.named_modules():
        for name, value in _attributes(module):
            for end, held in _within(value, CONTAINERS):
                if all(held is not other for other in found.values()):
                    found[f"{path}.{name}{end}".lstrip(".")] = held
    for path, held in list(found.items()):
        found |= {f"{path}.{name}": inner for name, inner in frozen_in(held.module).items()}
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and of one that it stands for: both have the same children."""
    yield from vars(module).items()
    for value in vars(module).values():
        if isinstance(value, nn.Module) and value._modules is module._modules:
            yield from vars(value).items()


def _within(value: Any, depth: int) -> Iterator[tuple[str, Frozen]]:
    if type(value) is Frozen:
        yield "", value
    elif depth and isinstance(value, (list, tuple)):
        for i, item in enumerate(islice(value, MAX_ITEMS)):
            yield from ((f"[{i}]{end}", held) for end, held in _within(item, depth - 1))
    elif depth and type(value) is dict:
        for key, item in islice(value.items(), MAX_ITEMS):
            yield from ((f"[{key!r}]{end}", held) for end, held in _within(item, depth - 1))


def every_module(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a tree and those of the frozen modules in it."""
    yield from root.modules()
    for held in frozen_in(root).values():
        yield from held.module.modules()
