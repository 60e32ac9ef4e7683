"""Modules that run compiled, in place, and can be restored."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from forge.contract.task import STAGE_METHODS, TaskCall
from forge_plugins.compile.compile_watch import graphs_so_far

BY_TYPE = {
    "Unsupported": "compile.fullgraph=true takes no graph breaks: change that line, or leave fullgraph out.",
    "FailOnRecompileLimitHit": "compile.fullgraph=true does not continue without a graph: give every batch one shape, "
    "or set compile.dynamic=true.",
}
"""Advice for errors of the compiler, by class."""


@dataclass(slots=True)
class Function:
    """A compiled function for one kind of call."""

    call: Callable[..., Any]
    graphs: int | None = 0
    "Graphs compiled by its calls; None if unknown."


@dataclass(slots=True)
class Functions:
    """Compiled functions, made on demand, each with its own code object.

    torch keeps graphs, and counts recompiles, by code object. With a shared one, training and evaluation, each
    optimizer's turn and different blocks would be recompiles of each other, up to a limit that ends compilation.
    """

    options: Mapping[str, Any]
    after: Callable[[], None] | None = None
    "Called when a graph may have been compiled."
    made: dict[tuple[Any, ...], Function] = field(default_factory=dict)

    def make(self, key: tuple[Any, ...], name: str, forward: Callable[..., Any]) -> Function:
        """Make the function for calls of this kind."""
        function = self.made[key] = Function(torch.compile(_renewed(name, forward), **self.options))
        return function


def _renewed(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` in a function with its own code. torch skips its own code, such as a Sequential's."""

    def whole(module: nn.Module, batch: Any, stage: str, name: str | None = None) -> Any:
        return forward(module, batch, stage, name)

    def block(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    run = whole if forward is TaskCall.forward else block  # torch's messages name the arguments
    run.__code__ = run.__code__.replace(co_name=name)
    run.__name__ = run.__qualname__ = name
    return run


class Region:
    """The value of a module's `_compiled_call_impl`."""

    called = False

    def __init__(self, name: str, module: nn.Module, functions: Functions, alike: int):
        self.name, self.module, self.functions, self.alike = name, module, functions, alike

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return self._with_hooks(args, kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        module, self.called = self.module, True
        forward = _own_forward(module)
        words = self._words(args, kwargs)
        key = (self.alike, forward, module.training, torch.is_grad_enabled(), *words)
        function = self.functions.made.get(key)
        if function is None:
            function = self.functions.make(key, self._title(*words), forward)
        try:
            if function.graphs:
                return function.call(module, *args, **kwargs)
            before = graphs_so_far()
            output = function.call(module, *args, **kwargs)
        except Exception as error:
            _note(error)
            raise
        after = graphs_so_far()
        function.graphs = after - before if after is not None and before is not None else None
        if self.functions.after is not None:
            self.functions.after()
        return output

    def _with_hooks(self, args: Any, kwargs: Any) -> Any:
        """Run hooks outside of the graph, so that later ones are called, and none changes the graph."""
        own = vars(self.module).get("forward")
        stand_in = _Stand(self._run, own)
        vars(self.module)["forward"] = stand_in
        try:
            return self.module._call_impl(*args, **kwargs)
        finally:
            vars(self.module).pop("forward")
            if own is not None:
                vars(self.module)["forward"] = own

    def _words(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what else distinguishes kinds of calls."""
        return ()

    def _title(self, *words: Any) -> str:
        return type(self.module).__name__


class WholeRegion(Region):
    """The shell around the task, with a graph for each stage and optimizer."""

    def _words(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return (*args[1:], *kwargs.values())

    def _title(self, *words: Any) -> str:
        return STAGE_METHODS.get(words[0], "forward")


@dataclass(frozen=True, slots=True)
class _Stand:
    """Replaces a module's `forward` while its hooks run."""

    run: Callable[..., Any]
    own: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the module's forward as a function of the module: equal modules share it."""
    own = vars(module).get("forward")
    if isinstance(own, _Stand):
        own = own.own
    if own is None:
        return type(module).forward
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__
    return _Unbound(own)


@dataclass(frozen=True, slots=True)
class _Unbound:
    """An assigned forward, which does not take its module."""

    own: Callable[..., Any]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs)


def _note(error: Exception) -> None:
    """Add advice to an error of the compiler; errors of the user's code stay unchanged."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return
    advice = BY_TYPE.get(type(error).__name__)
    if "InvalidCxxCompiler" in str(error):
        advice = "no working C++ compiler was found: install g++, or set CXX."
    advice = advice or "the compiler failed; compile.backend=aot_eager shows whether the code generator is at fault."
    error.add_note(f"forge: {advice}")


# ---------------------------------------------------------------------------------------------------------------------
# All regions


class Regions:
    """The modules that one run compiles: the whole shell, or blocks."""

    def __init__(self, modules: Mapping[str, nn.Module], whole: bool):
        self._modules, self.whole = modules, whole
        self.all: list[Region] = []

    def install(self, options: Mapping[str, Any], after: Callable[[], None] | None = None) -> None:
        """Compile, lazily: torch compiles at the first call, and `after` is called then."""
        self.all = self.make(options, after)
        self._call(self.all)

    def make(self, options: Mapping[str, Any], after: Callable[[], None] | None = None) -> list[Region]:
        """Return compiled functions of the modules, apart from all others of them."""
        functions, signatures = Functions(options, after), {}
        made: list[Region] = []
        for name, module in self._modules.items():
            alike = signatures.setdefault(_signature(module), len(signatures))
            made.append((WholeRegion if self.whole else Region)(name, module, functions, alike))
        return made

    def remove(self) -> None:
        """Restore the modules."""
        self._call([None] * len(self._modules))

    @contextmanager
    def instead(self, regions: Sequence[Region] = ()) -> Iterator[None]:
        """Run these compiled functions in the place of the run's inside the `with`; without any, run eagerly."""
        before = [module._compiled_call_impl for module in self._modules.values()]
        self._call(regions or [None] * len(before))
        try:
            yield
        finally:
            self._call(before)

    def _call(self, calls: Sequence[Any]) -> None:
        for module, call in zip(self._modules.values(), calls, strict=True):
            module._compiled_call_impl = call

    def empty(self) -> list[str]:
        """Return the modules without a graph, for themselves or for equal modules."""
        made = self.all[0].functions.made if self.all else {}
        compiled = {key[0] for key, function in made.items() if function.graphs != 0}
        return [region.name for region in self.all if not (region.called and region.alike in compiled)]


def _signature(module: nn.Module) -> Hashable:
    """Return a key equal for modules that can share a graph: same class, repr, and tensor shapes."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return type(module), repr(module), tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
