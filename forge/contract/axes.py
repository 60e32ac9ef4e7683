"""Axes: the mesh of processes, what ranks divide along each of its dimensions, and which plugins combine.

A plugin owns axes and declares what their ranks divide: `axes = {"shard": "samples weights"}`. All else follows.
Where ranks divide samples or positions, each has the gradient of a part, so the strategy averages gradients along that
axis; along all others a rank has the gradients of what is its own. The strategy declares under `*` what may be divided
along axes of other plugins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from forge import registry
from forge.errors import StackError, did_you_mean

if TYPE_CHECKING:
    from forge.contract.plugin import Plugin

KINDS = ("samples", "weights", "blocks", "positions", "experts", "matrices")
"""What ranks divide, the outermost axis first: neighbours have the fast links, which matrices need most."""
PARTS = frozenset({"samples", "positions"})
"""What gives each rank the gradient of a part of the batch: gradients are averaged along it."""
STRATEGY = "strategy"
"""What the plugin provides that averages gradients."""
DATA = "data"
"""The axis of ranks that differ in their samples alone; it takes what no other axis does."""

OTHERS = "*"
"""In the axes of a strategy: those of other plugins."""

Mesh = dict[str, int]
Axes = Mapping[str, str]


def own_axes(declared: Axes) -> dict[str, frozenset[str]]:
    """Return the axes that a plugin owns, with what ranks divide along each."""
    return {axis: frozenset(words.split()) for axis, words in declared.items() if axis != OTHERS}


def kinds(plugins: Iterable[Plugin]) -> dict[str, frozenset[str]]:
    """Return what ranks divide along each axis of these plugins."""
    found = {DATA: frozenset({"samples"})}
    for plugin in plugins:
        found |= own_axes(plugin.axes)
    return found


def ordered(axes: Iterable[str], divided: Mapping[str, Collection[str]]) -> list[str]:
    """Return axes from the outermost to the innermost."""

    def place(axis: str) -> list[int]:
        return sorted(KINDS.index(kind) for kind in divided.get(axis, ("matrices",)))

    return sorted(axes, key=place)


def shown(mesh: Mapping[str, int]) -> str:
    """Return a mesh as it is written on the command line."""
    return f"trainer.mesh={{{', '.join(f'{axis}: {size}' for axis, size in mesh.items())}}}"


# -- which plugins combine --------------------------------------------------------------------------------------------


def strategy_of(plugins: Sequence[Plugin]) -> Plugin | None:
    """Return the plugin that averages gradients."""
    return next((plugin for plugin in plugins if STRATEGY in plugin.provides), None)


def refuse_apart(plugins: Sequence[Plugin]) -> None:
    """Refuse plugins that divide what the strategy does not work beside, with the strategy that does."""
    strategy = strategy_of(plugins)
    for plugin in plugins:
        if plugin is strategy or not plugin.axes:
            continue
        own = _to_know(plugin.axes)
        if strategy is None:
            raise StackError(
                f"{plugin.name!r} divides {' and '.join(sorted(own))}, and no plugin of this stack averages their "
                f"gradients.{instead(plugins)}"
            )
        if not own <= _beside(strategy.axes):
            raise StackError(
                f"{strategy.name!r} does not work where ranks divide {' and '.join(sorted(own))}, as {plugin.name!r} "
                f"does.{instead(plugins)}"
            )


def _to_know(declared: Axes) -> set[str]:
    """Return what a strategy must know of the axes of another plugin: samples it divides itself."""
    return {kind for words in own_axes(declared).values() for kind in words} - {"samples"}


def _beside(declared: Axes) -> set[str]:
    """Return what a strategy lets other plugins divide."""
    return {*declared.get(OTHERS, "").split()}


def instead(plugins: Sequence[Plugin]) -> str:
    """Return the nearest meshes that installed plugins make: with all axes of these, or else with as many as can be."""
    names = {plugin.name for plugin in plugins}
    asked = {name: own for name, own in registry.declared("axes").items() if name in names}
    axes = ordered({axis for own in asked.values() for axis in own_axes(own) if axis != DATA}, _installed_kinds())
    for count in range(len(axes), -1, -1):
        found = []
        for some in itertools.combinations(axes, count):
            far = {tuple(stack): (len(stack), len({*stack} - asked.keys())) for stack in _stacks({*some}, asked)}
            best = [stack for stack, distance in far.items() if distance == min(far.values())]
            named = ", or ".join(" ".join(f"-p {name}" for name in stack) for stack in best)
            found += [f"{' x '.join(some or (DATA,))}: use {named}"] if best else []
        if found:
            return f" The nearest mesh is {'; or '.join(found)}."
    return ""


def _stacks(axes: set[str], asked: Mapping[str, Axes]) -> Iterator[list[str]]:
    """Yield a strategy, and those of the asked plugins that it works beside, where together they own the axes."""
    declared = registry.declared("axes")
    for name in registry.providers(STRATEGY):
        if name not in declared:
            continue
        mine = own_axes(declared[name])
        others = [
            other
            for other, own in asked.items()
            if other != name and not own_axes(own).keys() <= mine.keys() and _to_know(own) <= _beside(declared[name])
        ]
        if axes <= {axis for each in (name, *others) for axis in own_axes(declared[each])}:
            yield [name, *others]


def _installed_kinds() -> dict[str, frozenset[str]]:
    return {axis: words for own in registry.declared("axes").values() for axis, words in own_axes(own).items()}


# -- how large each axis is -------------------------------------------------------------------------------------------


def refuse_unowned(mesh: Mapping[str, int], plugins: Sequence[Plugin]) -> None:
    """Refuse an axis of `trainer.mesh` that no plugin of the stack owns, with the plugin to add."""
    owned = {axis for plugin in plugins for axis in own_axes(plugin.axes)}
    declared = registry.declared("axes")
    for axis, size in mesh.items():
        if axis in owned or (size == 1 and axis in _installed_kinds()):
            continue
        owners = [name for name, own in declared.items() if axis in own]
        if not owners:
            known = ordered(_installed_kinds(), _installed_kinds())
            raise StackError(
                f"trainer.mesh has the axis {axis!r}, which no installed plugin owns; there are {', '.join(known)}."
                f"{did_you_mean(axis, known)}"
            )
        add = " or ".join(f"-p {name}" for name in owners)
        raise StackError(
            f"trainer.mesh has {axis}: {size}, but no plugin of this stack divides along {axis!r}. Add {add}."
        )


def shape_of(
    given: Mapping[str, int], asked: Mapping[str, int], divided: Mapping[str, Collection[str]], world: int
) -> Mesh:
    """Return the size of every axis, the outermost first; refuse sizes whose product is not the number of processes.

    `given` is the whole mesh, from `trainer.mesh`. `asked` are sizes by plugins; of those that ask for 0, the innermost
    axis takes what is left.
    """
    if not given and not any(size == 0 for size in asked.values()):
        asked = {DATA: 0, **asked}
    axes = ordered({**asked, **{axis: size for axis, size in given.items() if size > 1}}, divided)
    if given:
        for axis, size in asked.items():
            if size and size != given.get(axis, 1):
                raise StackError(
                    f"A plugin asks for {size} ranks along {axis!r}, but trainer.mesh has {given.get(axis, 1)}. Leave "
                    "one of the two out."
                )
        sizes = {axis: given.get(axis, 1) for axis in axes}
        if math.prod(sizes.values()) != world:
            raise _impossible(sizes, world, f"that is {math.prod(sizes.values())} processes")
        return sizes
    fixed = math.prod(size for size in asked.values() if size)
    if world % fixed:
        raise _impossible({axis: asked[axis] for axis in axes}, world, f"{world} is no multiple of {fixed}")
    sizes = {axis: asked[axis] or 1 for axis in axes}
    sizes[[axis for axis in axes if not asked[axis]][-1]] = world // fixed
    return sizes


def _impossible(wanted: Mesh, world: int, why: str) -> StackError:
    near = nearest(wanted, world)
    arranged = " x ".join(f"{axis} {size}" for axis, size in wanted.items() if size > 1)
    return StackError(
        f"{world} processes cannot be arranged as {arranged}: {why}. Start another number of processes, or change the "
        f"sizes; the nearest mesh is {shown(near)}."
    )


def nearest(wanted: Mapping[str, int], world: int) -> Mesh:
    """Return the mesh of `world` processes whose sizes differ least from those wanted, by their ratios; a size of 0
    may be anything."""

    def distance(sizes: Sequence[int]) -> tuple[float, int]:
        pairs = [(size, want) for size, want in zip(sizes, wanted.values(), strict=True) if want]
        return sum(abs(math.log(size / want)) for size, want in pairs), -sizes[0]

    return dict(zip(wanted, min(_factors(world, len(wanted)), key=distance), strict=True))


def _factors(number: int, count: int) -> Iterator[list[int]]:
    if count == 1:
        yield [number]
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        for rest in _factors(number // first, count - 1):
            yield [first, *rest]
