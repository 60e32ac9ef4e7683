"""Train for long, and many times in one process, and check that nothing accumulates.

    python -m benchmarks.soak                                 # a run of 200,000 updates, then 2,000 fits
    python -m benchmarks.soak --only fits --fits 500
    python -m benchmarks.soak --only run --plant threads      # lose a thread at every validation: exit 1
    python -m benchmarks.soak --json > soak.jsonl             # one JSON object per line: the machine, then the rows

The run trains a small network on the CPU with the default recipe's plugins except the progress bar (jsonl, tensorboard,
guard, checkpoint), and validates and saves at the end of every epoch. The fits take turns: without plugins, with the
default ones, averaged, clipped and accumulated, in bf16, with a data worker, stopped and resumed, and failing in the
task, in the data, in a validation, in a plugin and before the first update. Each fit that saves has a folder of its
own, which is removed after it.

A hundred times along the way the process is looked at, between checkpoints and after a garbage collection: resident
memory, open descriptors, threads (also those of libraries), objects that Python's collector knows, and tensors among
them. The table shows the samples at 10 %, 50 % and 100 %. "growth" is the slope after the first 10 % (the median slope
of all pairs of samples, so that a single moment does not count), times what is left. The verdict is "flat" if no growth
is above its limit; else "grows", and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import TensorDataset

import forge
from benchmarks import machine
from forge.checkpoint.writer import wait_until_written
from forge.contract.requests import Request
from forge.data import Loader
from forge.errors import DataError
from forge.testing import TinyTask, tiny_batches
from forge_plugins import AMP, EMA, JSONL, Accumulate, Checkpoint, Clip, Guard, Tensorboard

SAMPLES = 100
WARM_UP = 0.1
SHOWN = (0.1, 0.5, 1.0)
LIMITS = {"megabytes": 2.0, "descriptors": 0.5, "threads": 0.5, "objects": 100.0, "tensors": 0.5}
"""Largest growth that counts as flat: what an allocator and interpreter move by themselves, and nothing else."""

Plant = Callable[[], None]


class Sample(NamedTuple):
    """What the process holds at one point: after `at` updates or fits."""

    at: int
    megabytes: float
    descriptors: int
    threads: int
    objects: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity over one part of the soak."""

    part: str
    quantity: str
    shown: list[float]
    growth: float
    limit: float

    @property
    def flat(self) -> bool:
        return self.growth <= self.limit


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    talk = Console(stderr=True)
    print(json.dumps({"machine": machine.describe()}) if options.json else machine.sentence())
    logging.getLogger("forge").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the network is small: threads would only wait for each other
    plant = PLANTS[options.plant] if options.plant else None
    parts = {
        "run": lambda: soak_run(options.updates, options.validations, plant),
        "fits": lambda: soak_fits(options.fits, plant),
    }
    rows: list[Row] = []
    for part in [options.only] if options.only else parts:
        talk.print(f"{part} ...", style="dim")
        rows += rows_of(part, parts[part]())
    for row in rows if options.json else ():
        print(json.dumps({**asdict(row), "flat": row.flat}))
    if not options.json:
        Console(width=max(110, Console().width)).print(_table(rows))
    return 0 if all(row.flat for row in rows) else 1


# -- measuring --------------------------------------------------------------------------------------------------------


def sample(at: int) -> tuple[Any, ...]:
    """Return the values of a Sample, as a plain tuple, which the collector does not count."""
    wait_until_written()
    gc.collect()
    known = gc.get_objects()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return (
        at,
        resident / 2**20,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(known),
        sum(issubclass(type(item), torch.Tensor) for item in known),
    )


def rows_of(part: str, samples: Sequence[Sample]) -> list[Row]:
    """Judge the samples of one part: a row for every quantity."""
    after = [item for item in samples if item.at >= WARM_UP * samples[-1].at]
    shown = [next(item for item in samples if item.at >= share * samples[-1].at) for share in SHOWN]
    return [
        Row(part, quantity, [getattr(item, quantity) for item in shown], _growth(after, quantity), limit)
        for quantity, limit in LIMITS.items()
    ]


def _growth(samples: Sequence[Sample], quantity: str) -> float:
    """Return the median slope of all pairs of samples, over the whole span."""
    points = [(item.at, getattr(item, quantity)) for item in samples]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2)]
    return statistics.median(slopes) * (points[-1][0] - points[0][0])


# -- one long run -----------------------------------------------------------------------------------------------------


def soak_run(updates: int, validations: int, plant: Plant | None = None, samples: int = SAMPLES) -> list[Sample]:
    """Train once; return the samples. `plant` is called at every validation."""
    epoch = updates // validations
    found: list[tuple[Any, ...]] = []
    moments = {round((n + 1) * validations / samples) * epoch - 1 for n in range(samples)}  # before a validation

    @forge.on("start")
    def fill(trainer: forge.Trainer) -> None:
        """Begin with a full log of requests, of which a run keeps the latest: it would grow up to its bound."""
        log = trainer.requests.log
        log.extend(Request("checkpoint", "", "soak", number) for number in range(log.maxlen or 0))

    @forge.on("boundary")
    def look(trainer: forge.Trainer) -> None:
        if trainer.progress.update in moments:
            found.append(sample(trainer.progress.update))
        if plant is not None and trainer.progress.update % epoch == 0:
            plant()

    with tempfile.TemporaryDirectory() as folder, _counting_from_here():
        settings: dict[str, Any] = {"max_epochs": validations, "seed": 0, "device": "cpu", "run_dir": folder}
        trainer = forge.Trainer(plugins=[JSONL(), Tensorboard(), Guard(), Checkpoint(), fill, look], **settings)
        trainer.fit(TinyTask(), tiny_batches([8] * epoch), tiny_batches())
    return [Sample(*values) for values in found]


@contextmanager
def _counting_from_here() -> Iterator[None]:
    """Leave out what exists by now, such as modules: it is neither counted nor looked through at each sample."""
    for kind in (_default, lambda folder: _fit(folder, AMP("bf16"))):  # what is imported on first use
        with tempfile.TemporaryDirectory() as folder:
            kind(Path(folder))
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# -- many fits --------------------------------------------------------------------------------------------------------


def soak_fits(fits: int, plant: Plant | None = None, samples: int = SAMPLES) -> list[Sample]:
    """Fit again and again in turns; return the samples, each after whole turns. `plant` is called after every fit."""
    found: list[tuple[Any, ...]] = []
    turn = len(KINDS)
    every = max(1, fits // turn // samples) * turn
    with _counting_from_here():
        for number in range(1, fits + 1):
            with tempfile.TemporaryDirectory() as folder:
                KINDS[number % turn](Path(folder))
            if plant is not None:
                plant()
            if number % every == 0:
                found.append(sample(number))
    return [Sample(*values) for values in found]


def _fit(folder: Path | bool, *plugins: Any, task: Any = None, train: Any = None, **options: Any) -> None:
    settings: dict[str, Any] = {"max_updates": 6, "seed": 0, "device": "cpu", "run_dir": folder, **options}
    forge.Trainer(plugins=list(plugins), **settings).fit(task or TinyTask(), train or tiny_batches(), tiny_batches())


def _default(folder: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 2, "seed": 0, "device": "cpu", "run_dir": folder}
    trainer = forge.Trainer(recipe="default", plugins={"progress": None}, **settings)
    trainer.fit(TinyTask(), tiny_batches(), tiny_batches())
    trainer.validate(TinyTask(), tiny_batches())


def _resumed(folder: Path) -> None:
    for updates in (3, 6):
        _fit(folder, Checkpoint(every="2 updates"), JSONL(), EMA(), max_updates=updates, resume="auto")


def _with_worker(folder: Path) -> None:
    _fit(folder, Checkpoint(), train=Loader(TensorDataset(*tiny_batches([24])[0]), 8, shuffle=True, num_workers=1))


class Planned(Exception):
    """The failure of a fit that is meant to fail."""


class FailingTask(TinyTask):
    """Fails in one of its methods, at the third training step if it is that."""

    def __init__(self, where: str):
        super().__init__()
        self.where, self.steps = where, 0

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        self._fail("training", self.steps == 3)
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._fail("validation")
        return super().training_step(batch)

    def configure_optimizers(self) -> Any:
        self._fail("optimizers")
        return super().configure_optimizers()

    def _fail(self, where: str, now: bool = True) -> None:
        if now and where == self.where:
            raise Planned


class FailingData(TensorDataset):
    """Fails at its last sample."""

    def __getitem__(self, index: int) -> Any:
        if index == len(self) - 1:
            raise Planned
        return super().__getitem__(index)


class FailingPlugin(forge.Plugin):
    @forge.hookimpl
    def forge_save(self, trainer: forge.Trainer, capture: dict[str, Any]) -> None:
        raise Planned


def _failing(
    *plugins: Callable[[], Any], where: str = "", train: Callable[[], Any] = tiny_batches
) -> Callable[..., None]:
    def fail(folder: Path) -> None:
        try:
            _fit(folder, *[make() for make in plugins], task=FailingTask(where), train=train())
        except (Planned, DataError) as error:
            if isinstance(error.__cause__ or error, Planned):
                return
            raise
        raise RuntimeError("A fit that should have failed did not.")

    return fail


KINDS: list[Callable[[Path], None]] = [
    lambda folder: _fit(False),
    _default,
    lambda folder: _fit(folder, EMA(), Clip(1.0), Accumulate(2), Checkpoint(), JSONL()),
    lambda folder: _fit(folder, AMP("bf16"), Guard(), Checkpoint()),
    _resumed,
    _with_worker,
    _failing(Checkpoint, JSONL, Guard, where="training"),
    _failing(Checkpoint, EMA, where="validation"),
    _failing(Checkpoint, JSONL, train=lambda: Loader(FailingData(*tiny_batches([24])[0]), 8)),
    _failing(Checkpoint, JSONL, FailingPlugin),
    _failing(Checkpoint, where="optimizers"),
]


# -- planted leaks ----------------------------------------------------------------------------------------------------

_kept: list[Any] = []
PLANTS: dict[str, Plant] = {
    "descriptors": lambda: _kept.append(os.open("/dev/null", os.O_RDONLY)),
    "threads": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "objects": lambda: _kept.append([[]]),
    "tensors": lambda: _kept.append(torch.zeros(1)),
    "megabytes": lambda: _kept.append(bytes(2**16)),
}


# -- command line -----------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row]) -> Table:
    table = Table("part", "quantity", *[f"at {share:.0%}" for share in SHOWN], "growth", "limit", "verdict")
    for row in rows:
        digits = 1 if row.quantity == "megabytes" else 0
        values = [f"{value:,.{digits}f}" for value in row.shown]
        verdict = "flat" if row.flat else "[red]grows[/]"
        table.add_row(row.part, row.quantity, *values, f"{row.growth:+.1f}", f"{row.limit:g}", verdict)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=200_000, help="updates of the long run (default: %(default)s)")
    parser.add_argument("--validations", type=int, default=500, help="validations of it (default: %(default)s)")
    parser.add_argument("--fits", type=int, default=2_000, help="fits in one process (default: %(default)s)")
    parser.add_argument("--only", choices=("run", "fits"), help="one part only")
    parser.add_argument("--plant", choices=PLANTS, help="lose one of these at every validation or fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
