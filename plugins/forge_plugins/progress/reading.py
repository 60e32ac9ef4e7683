"""Format numbers, times and metrics for display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forge.runs.wording import rate
from forge_plugins.progress.status import Status

FIRST = ("train", "val", "test", "lr")
"""Order of metrics; all others follow."""


def epoch_of(status: Status) -> str:
    """ "epoch  3/10", or "epoch 3" without a limit."""
    if status.max_epochs is None:
        return f"epoch {status.epoch}"
    return f"epoch {status.epoch:>{len(str(status.max_epochs))}}/{status.max_epochs}"


def updates_of(status: Status) -> str:
    """ "240/600", padded to a constant width."""
    if status.planned is None:
        return f"{status.update}"
    return f"{status.update:>{len(str(status.planned))}}/{status.planned}"


def speed_of(speed: float, wide: bool) -> str:
    """ "143/s", or for slow steps "2.5 s each"; empty while unknown."""
    if speed < 1:
        return f"{1 / speed:.3g} s/update" if speed else ""
    unit = " updates/s" if wide else "/s"
    return f"{speed:,.0f}{unit}" if speed >= 100 else f"{speed:.1f}{unit}"


def rates_of(status: Status, wide: bool, with_samples: bool = True) -> str:
    """ "143/s  9,152 samples/s"."""
    samples = rate(status.speed * status.samples_per_update, "samples") if with_samples else ""
    return "  ".join(filter(None, [speed_of(status.speed, wide), samples]))


def within_epoch(status: Status) -> str:
    """ "12/20": updates of the current epoch."""
    if status.per_epoch is None or status.epoch_share is None:
        return ""
    return f"{round(status.epoch_share * status.per_epoch):>{len(str(status.per_epoch))}}/{status.per_epoch}"


def share_of(status: Status) -> str:
    """ "13 %" of the whole run."""
    return "" if not status.planned else f"{100 * min(status.update / status.planned, 1.0):.0f} %"


def clock(seconds: float) -> str:
    """ "0:07", "12:34", "1:02:03"."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def short(name: str, value: float) -> str:
    """Return a few digits, of nearly constant width."""
    size = abs(value)
    if isinstance(value, int) or 1e4 <= size < 1e7:
        return f"{value:,.0f}"
    if name.partition("/")[0] == "lr":
        return f"{value:.3g}"
    if size == 0 or 0.01 <= size < 10:
        return f"{value:.4f}"
    return f"{value:#.4g}".rstrip(".") if 1e-3 <= size < 1e4 else f"{value:.2e}"


def ordered(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (name, short value), training first."""

    def rank(name: str) -> int:
        head = name.partition("/")[0]
        return FIRST.index(head) if head in FIRST else len(FIRST)

    return [(name, short(name, metrics[name])) for name in sorted(metrics, key=rank)]


def grouped(metrics: Mapping[str, float]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield metrics grouped by the part before the first slash: ("train", [("loss", "0.1234"), ...])."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value in ordered(metrics):
        head, slash, rest = name.partition("/")
        groups.setdefault(head if slash else "", []).append((rest or head, value))
    yield from groups.items()


def listed(metrics: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value}" for name, value in ordered(metrics))
