"""The levers of speed: what each changes in a recipe, where it applies, and what it does to the numbers.

A package offers some by the entry point `forge.levers`: a function that takes a `LeverSituation` and yields `Lever`s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forge import registry
from forge.errors import ForgeError
from forge.tuning.workers import OPTIONS as WORKER_OPTIONS
from forge_speed.step_facts import StepFacts

__all__ = ["Change", "Lever", "LeverSituation", "StepFacts"]

Numbers = Literal["bitwise", "rounding", "precision"]
NUMBERS: tuple[Numbers, ...] = ("bitwise", "rounding", "precision")
"""What a change does to the numbers: the same bits, other last bits, another precision. Each permits those before."""
YOURS = "your stack has it"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a recipe: of its plugins, and of the options of its data. Settings of the Trainer stay."""

    plugins: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    "Options by plugin, merged over those that it has: `{}` adds it as it is, None removes it."
    data: Mapping[str, Any] = field(default_factory=dict)
    "Options of the data by name."

    def __or__(self, other: Change) -> Change:
        plugins = dict(self.plugins)
        for name, options in other.plugins.items():
            plugins[name] = None if options is None else {**(plugins.get(name) or {}), **options}
        return Change(plugins, {**self.data, **other.data})

    def as_data(self) -> dict[str, Any]:
        """Return the change as plain data."""
        return {"plugins": {name: o if o is None else dict(o) for name, o in self.plugins.items()}, **_given(self.data)}


def _given(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"data": dict(data)} if data else {}


STRICT = Change({"cuda_graph": {"strict": True}})


@dataclass(frozen=True, slots=True)
class Lever:
    """One change that may make a step faster."""

    name: str
    "In the table; `--without NAME` leaves it out."
    change: Change
    "What it does to the recipe."
    numbers: Numbers
    'What it does to the numbers: "bitwise" nothing, "rounding" other last bits, "precision" more.'
    group: str = ""
    "Of the levers of a group only one is used."
    why_not: str = ""
    "Why it is not tried here; empty if it is."
    slow: bool = False
    "Takes minutes: tried only while most of the budget is left."
    in_trials: Change = Change()
    "Options of a trial alone, such as a failure in place of a silent fallback."

    def __post_init__(self) -> None:
        if self.numbers not in NUMBERS:
            raise ForgeError(f"Lever {self.name!r}: numbers={self.numbers!r}: choose from {', '.join(NUMBERS)}.")


@dataclass(frozen=True, slots=True)
class LeverSituation:
    """Everything that decides which levers apply."""

    facts: StepFacts
    "What the first trial has seen of the step."
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    "The plugins of the user's stack, with the options that the user gave."
    data: Mapping[str, Any] = field(default_factory=dict)
    "The options of the data with their values; empty if the data cannot be made again."
    installed: Collection[str] = ()
    "The names of all installed plugins."
    leave_out: Collection[str] = ()
    "Plugins and levers that the user excludes."
    cores: int = 1
    "Of the CPU, that this process may use."

    def why_not(self, plugin: str, device: str = "") -> str:
        """Return why a plugin cannot be added here; empty if it can."""
        if plugin in {name.partition("@")[0] for name in self.given}:
            return YOURS
        if plugin in self.leave_out:
            return "left out"
        if plugin not in self.installed:
            return "not installed"
        return f"needs {device.upper()}" if device and self.facts.device != device else ""

    def open_option(self, plugin: str, *options: str) -> bool:
        """Return whether the stack has a plugin whose options the user has left open."""
        given = self.given.get(plugin)
        return given is not None and not any(name in given for name in options)


def levers(situation: LeverSituation) -> list[Lever]:
    """Return every lever, those too that do not apply here: forge's own, then those of installed packages."""
    found = [lever for family in FAMILIES for lever in family(situation)]
    for name in registry.installed("lever"):
        found += registry.call_or_leave_out("lever", name, situation, of=Lever) or ()
    named = set(situation.leave_out)
    return [_without(lever) if lever.name in named and not lever.why_not else lever for lever in found]


def _without(lever: Lever) -> Lever:
    return Lever(lever.name, lever.change, lever.numbers, lever.group, "left out")


# -- precision --------------------------------------------------------------------------------------------------------


def amp(s: LeverSituation) -> Iterator[Lever]:
    why_not = s.why_not("amp") or ("the task computes in short types itself" if not s.facts.float32 else "")
    yield Lever("amp bf16", Change({"amp": {"dtype": "bf16"}}), "precision", "amp", why_not)


def fp8(s: LeverSituation) -> Iterator[Lever]:
    if "fp8" in s.installed:
        yield Lever("fp8", Change({"fp8": {}}), "precision", "fp8", s.why_not("fp8", "cuda"))


def tf32(s: LeverSituation) -> Iterator[Lever]:
    short = "" if s.facts.float32 else "the task computes in short types itself"
    why_not = s.why_not("backends", "cuda") or short
    yield Lever("TF32", Change({"backends": {"tf32": True}}), "precision", "tf32", why_not)


def backends(s: LeverSituation) -> Iterator[Lever]:
    """Measured convolutions, and the order of attention's backends: options of the plugin that sets TF32 too."""
    why_not = s.why_not("backends", "cuda")
    plain = "" if s.facts.convolutions else "no convolutions"
    measured = Change({"backends": {"cudnn_benchmark": True}})
    yield Lever("cuDNN benchmark", measured, "rounding", "cudnn", why_not or plain)
    if s.facts.attention and not why_not:
        for first in ("cudnn", "flash", "efficient"):
            change = Change({"backends": {"attention": first}})
            yield Lever(f"attention {first}", change, "rounding", "attention")


# -- the step ---------------------------------------------------------------------------------------------------------


def compiling(s: LeverSituation) -> Iterator[Lever]:
    """The whole step, and the same in one graph, which often gains more than the two do alone."""
    yield Lever("compile", Change({"compile": {}}), "rounding", "compile", s.why_not("compile"))
    both = Change({"compile": {}, "cuda_graph": {}})
    if not s.why_not("cuda_graph", "cuda") and not s.why_not("compile"):
        yield Lever("compile + cuda_graph", both, "rounding", "compile", in_trials=STRICT)


def longer_compiling(s: LeverSituation) -> Iterator[Lever]:
    """Repeated blocks one by one, and modes of the compiler that search longer."""
    blocks = Change({"compile": {"blocks": list(s.facts.blocks)}})
    none = "" if s.facts.blocks else "no repeated blocks"
    yield Lever("compile by block", blocks, "rounding", "compile", _why_not_otherwise(s) or none)
    if s.facts.device == "cuda" and not _why_not_otherwise(s):
        for mode in ("reduce-overhead", "max-autotune-no-cudagraphs"):
            change = Change({"compile": {"mode": mode}})
            yield Lever(f"compile {mode}", change, "rounding", "compile", slow=mode != "reduce-overhead")


def _why_not_otherwise(s: LeverSituation) -> str:
    """Return why the step cannot be compiled in another way; a stack that compiles may leave that open."""
    return "" if s.open_option("compile", "blocks", "backend", "mode") else s.why_not("compile")


def cuda_graph(s: LeverSituation) -> Iterator[Lever]:
    change = Change({"cuda_graph": {}})
    yield Lever("cuda_graph", change, "bitwise", "", s.why_not("cuda_graph", "cuda"), in_trials=STRICT)


def kernels(s: LeverSituation) -> Iterator[Lever]:
    """All of them, and the one that torch.compile does not fuse with its neighbours."""
    why_not = s.why_not("kernels", "cuda")
    for name, use in (("kernels", "all"), ("kernels attention", "attention")):
        yield Lever(name, Change({"kernels": {"use": use}}), "rounding", "kernels", why_not)


def fused_optimizer(s: LeverSituation) -> Iterator[Lever]:
    why_not = s.why_not("fused_optimizer") or s.facts.not_fused
    yield Lever("fused_optimizer", Change({"fused_optimizer": {}}), "rounding", "", why_not)


def channels_last(s: LeverSituation) -> Iterator[Lever]:
    why_not = s.why_not("channels_last") or ("" if s.facts.convolutions else "no convolutions")
    yield Lever("channels_last", Change({"channels_last": {}}), "rounding", "", why_not)


# -- data -------------------------------------------------------------------------------------------------------------


def prefetch(s: LeverSituation) -> Iterator[Lever]:
    yield Lever("prefetch", Change({"prefetch": {}}), "bitwise", "", s.why_not("prefetch", "cuda"))


def workers(s: LeverSituation) -> Iterator[Lever]:
    """Other numbers of data workers, never more than the cores."""
    for name in [name for name in WORKER_OPTIONS if name in s.data]:
        now = s.data[name]
        for count in sorted({0, 1, 2, 4, 8, s.cores}):
            if count <= min(s.cores, 16) and count != now:
                yield Lever(f"workers {count}", Change({}, {name: count}), "bitwise", "workers")


# -- memory for time --------------------------------------------------------------------------------------------------


def no_remat(s: LeverSituation) -> Iterator[Lever]:
    if "remat" in s.given:
        yield Lever("no remat", Change({"remat": None}), "bitwise", "")


def micro_batches(s: LeverSituation) -> Iterator[Lever]:
    """The same global batch in larger micro-batches, or in smaller ones."""
    size, window = s.data.get("batch_size"), s.facts.window
    if not isinstance(size, int) or isinstance(size, bool):
        return
    per_batch = "BatchNorm's statistics depend on the micro-batch" if s.facts.batch_norm else ""
    given = s.given.get("accumulate")
    if given is not None and window > 1 and window % 2 == 0:
        merged = Change({"accumulate": {"window": window // 2}}, {"batch_size": size * 2})
        yield Lever(f"micro-batch {size * 2}", merged, "rounding", "micro-batch", per_batch)
    if given is None and window == 1 and size >= 8 and size % 2 == 0:
        why_not = s.why_not("accumulate") or per_batch
        split = Change({"accumulate": {"window": 2}}, {"batch_size": size // 2})
        yield Lever(f"micro-batch {size // 2}", split, "rounding", "micro-batch", why_not)


FAMILIES: list[Callable[[LeverSituation], Iterator[Lever]]] = [
    fused_optimizer,
    channels_last,
    amp,
    tf32,
    cuda_graph,
    compiling,
    backends,
    prefetch,
    workers,
    no_remat,
    micro_batches,
    kernels,
    fp8,
    longer_compiling,
]
"""What usually gains most comes first: the budget may not be enough for all. What takes minutes comes last."""
