"""Cluster: the machines that a plan is for, read from a small YAML file or known by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from forge.errors import ForgeError, did_you_mean
from forge.util import strict_yaml

GB, TERA, MICRO = 1e9, 1e12, 1e-6
PRECISIONS = ("fp32", "bf16", "fp8")
FILE = Path(__file__).with_name("figures.yaml")


@dataclass(frozen=True, slots=True)
class Link:
    """What connects two GPUs."""

    bandwidth: float
    "Bytes per second that one GPU sends, in one direction."
    latency: float
    "Seconds of one message."


class Share(NamedTuple):
    """A figure that predictions start from."""

    value: float
    how: str
    "measured, cited, derived, fitted, or given (by the cluster's file)."
    source: str


def _shares(given: Mapping[str, Any]) -> dict[str, Share]:
    return {name: Share(**share) for name, share in given.items()}


FIGURES: dict[str, Any] = strict_yaml.load(strict_yaml.read(FILE), FILE.name)
SHARES = _shares(FIGURES["shares"])


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The shares of the data sheet's figures that programs reach; figures.yaml says how each is known."""

    matmul: float = SHARES["matmul"].value
    fp8: float = SHARES["fp8"].value
    "Of matrix products in float8."
    attention: float = SHARES["attention"].value
    memory: float = SHARES["memory"].value
    compiled: float = SHARES["compiled"].value
    "Share of the time beside matrix products that is left after compile fuses operations."
    compiled_launch: float = SHARES["compiled_launch"].value
    "Share of the host's time that is left."
    links: float = SHARES["links"].value
    overlap: float = SHARES["overlap"].value
    "Share of the communication that can run beside computation; 0 where the same cores do both."
    many: float = SHARES["many"].value
    "Time of computation on more than one GPU, over that of its kernels."


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """An update that was timed on one GPU of the cluster; all computation is scaled to it."""

    seconds: float
    samples: int
    precision: str = "fp32"
    remat: bool = False


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs, their memory, speed and links. The YAML keys have the same names, in the units of the docs."""

    nodes: int
    gpus_per_node: int
    memory: int
    "Bytes per GPU."
    flops: Mapping[str, float]
    "FLOP per second by precision, dense."
    memory_bandwidth: float
    within: Link
    between: Link
    efficiency: Efficiency = Efficiency()
    launch: float = SHARES["launch"].value * MICRO
    "Seconds of the host per operation of the model."
    backend: str = "nccl"
    "gloo has no reduce-scatter of its own: torch reduces everything and keeps a part."
    cores: int | None = None
    "Processes that can compute at once, if there are fewer cores than ranks on a node; null: all."
    failures: float = 0.17
    "Failures per GPU and year that end a run."
    restart: float = 300.0
    "Seconds from a failure until training goes on from the checkpoint."
    host_copy: float = 20 * GB
    "Bytes per second at which a GPU's state is copied to the host when a checkpoint is taken."
    jitter: float = 0.01
    "Standard deviation of a GPU's time for an update, as a share of it."
    measured: MeasuredStep | None = None
    name: str = "cluster"
    gpu: str = ""
    "The known GPU that it has, as in `gpu: h100`."

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def shares(self) -> dict[str, Share]:
        """Return every figure that is in use, with its source."""
        known = SHARES | _shares(FIGURES["gpus"].get(self.gpu, {}).get("shares", {}))
        here = {"launch": self.launch / MICRO, **asdict(self.efficiency)}
        given = "the cluster's file"
        return {n: s if here[n] == s.value else Share(here[n], "given", given) for n, s in known.items()}

    def peak(self, precision: str) -> float:
        """Return FLOP per second; a precision that is not given runs like bf16, else like fp32."""
        order = {"fp8": ("fp8", "bf16", "fp32"), "bf16": ("bf16", "fp32"), "fp32": ("fp32", "bf16")}[precision]
        return next(self.flops[known] for known in order if known in self.flops)


UNITS: dict[str, float] = {
    "memory": 2**30,
    "memory_bandwidth": GB,
    "launch": MICRO,
    "host_copy": GB,
}
NEEDED = ("nodes", "gpus_per_node", "memory", "flops", "memory_bandwidth", "within", "between")


def load_cluster(source: str) -> Cluster:
    """Return the cluster of a YAML file, or of a name such as h100x16."""
    named = re.fullmatch(rf"({'|'.join(KNOWN)})(?:x(\d+))?", source.lower())
    if named and not Path(source).is_file():
        nodes = int(named[2] or 1)
        if nodes < 1:
            raise ForgeError(f"--cluster {source}: the number of nodes must be at least 1.")
        return replace(KNOWN[named[1]], nodes=nodes)
    path = Path(source)
    if not path.is_file():
        names = ", ".join(f"{name}xN" for name in KNOWN)
        raise ForgeError(f"--cluster {source}: no such file. Give a YAML file, or N nodes of 8 GPUs by name: {names}.")
    given = strict_yaml.load(strict_yaml.read(path), source)
    if not isinstance(given, dict):
        raise ForgeError(f"{source} must hold keys and values, such as 'nodes: 2'.")
    return read_cluster(given, source)


def read_cluster(given: Mapping[str, Any], source: str = "the cluster") -> Cluster:
    """Return the cluster of plain data, in the units of the file; `gpu: h100` fills in what is left out."""
    given = dict(given)
    base: Cluster | None = None
    if "gpu" in given:
        kind = str(given.pop("gpu")).lower()
        if kind not in KNOWN:
            raise ForgeError(f"{source}: gpu: {kind} is not known.{did_you_mean(kind, KNOWN)}")
        base = KNOWN[kind]
    names = [field.name for field in fields(Cluster)]
    for key in given:
        if key not in names:
            raise ForgeError(f"{source}: unknown key {key!r}.{did_you_mean(str(key), names)}")
    missing = [key for key in NEEDED if key not in given] if base is None else []
    if missing:
        raise ForgeError(f"{source} lacks {', '.join(missing)}. Add them, or 'gpu: h100' for those of a known GPU.")
    found: dict[str, Any] = {"name": Path(source).stem if base is None else base.name}
    for key, value in given.items():
        found[key] = _value(key, value, source)
    if "efficiency" in found:
        found["efficiency"] = replace(Efficiency() if base is None else base.efficiency, **found["efficiency"])
    if found.get("backend", "nccl") not in ("nccl", "gloo"):
        raise ForgeError(f"{source}: backend is {found['backend']!r}; it must be nccl or gloo.")
    return Cluster(**found) if base is None else replace(base, **found)


def _value(key: str, value: Any, source: str) -> Any:
    if key in ("within", "between"):
        link = _part(dict, key, value, source, ("bandwidth", "latency"))
        return Link(link["bandwidth"] * GB, link["latency"] * MICRO)
    if key == "flops":
        given = _part(dict, key, value, source, PRECISIONS, needed=())
        if not {"fp32", "bf16"} & given.keys():
            raise ForgeError(f"{source}: flops needs the TFLOP/s of bf16 or fp32.")
        return {name: number * TERA for name, number in given.items()}
    if key == "efficiency":
        return _part(dict, key, value, source, [f.name for f in fields(Efficiency)], needed=(), zero=True)
    if key == "measured":
        if not isinstance(value, Mapping) or not {"seconds", "samples"} <= value.keys():
            raise ForgeError(f"{source}: measured needs seconds and samples (and precision, remat).")
        unknown = value.keys() - {f.name for f in fields(MeasuredStep)}
        if unknown or value.get("precision", "fp32") not in PRECISIONS:
            raise ForgeError(f"{source}: measured has seconds, samples, precision (fp32, bf16, fp8) and remat.")
        return MeasuredStep(**value)
    if key in ("name", "backend", "gpu"):
        return str(value)
    if key == "cores" and value is None:
        return None
    return _number(key, value, source, whole=key in ("nodes", "gpus_per_node", "cores")) * UNITS.get(key, 1)


def _part(
    kind: type, key: str, value: Any, source: str, names: Any, needed: Any = None, zero: bool = False
) -> dict[str, float]:
    needed = names if needed is None else needed
    if not isinstance(value, kind) or set(value) - set(names) or set(needed) - set(value):
        raise ForgeError(f"{source}: {key} takes {', '.join(names)}, as in {{{next(iter(names))}: 1}}.")
    return {name: _number(f"{key}.{name}", number, source, zero=zero) for name, number in value.items()}


def _number(key: str, value: Any, source: str, whole: bool = False, zero: bool = False) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (whole and not isinstance(value, int)):
        raise ForgeError(f"{source}: {key} is {value!r}; it must be a {'whole ' if whole else ''}number.")
    if value < 0 or (value == 0 and not zero and key not in ("failures", "jitter", "launch", "restart")):
        raise ForgeError(f"{source}: {key} is {value:g}; it must be above 0.")
    return value


def _known(kind: str, sheet: Mapping[str, Any]) -> Cluster:
    shares = {name: share.value for name, share in _shares(sheet.get("shares", {})).items()}
    given = {key: value for key, value in sheet.items() if key not in ("source", "shares")}
    made = read_cluster({"nodes": 1, "gpus_per_node": 8, "efficiency": shares, **given}, kind)
    return replace(made, gpu=kind)


KNOWN: dict[str, Cluster] = {}
KNOWN.update({kind: _known(kind, sheet) for kind, sheet in FIGURES["gpus"].items()})
"""Nodes of 8 GPUs by the makers' data sheets; h100x16 is 16 of them."""
