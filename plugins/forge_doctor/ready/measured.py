"""Steps that measure: precisions, devices, the shares of host and loader, and whether two starts agree."""

from __future__ import annotations

import math
import os

import torch

import forge
from forge.data.accumulation_windows import length_of
from forge.data.protocols import is_live
from forge.progress import Interval
from forge.rng import seed_all
from forge.runs.wording import counted, duration
from forge.testing.trace import read_trace
from forge.tuning.workers import available_cores
from forge.util.text import format_bytes
from forge_doctor.ready.planned_run import FEWEST, TRAINED, NotAffordable, PlannedRun, UpdatePace
from forge_doctor.ready.report import Grid, RoadStep
from forge_doctor.witness import Witness, compare
from forge_plugins import AMP, Backends

PRECISIONS = {
    "float32": list,
    "tf32": lambda: [Backends(tf32=True)],
    "bf16": lambda: [AMP(dtype="bf16")],
    "fp16": lambda: [AMP(dtype="fp16")],
}
"""What is put into the stack for each."""
OF_GPUS = ("tf32", "fp16")
SHOWN = 2
"""Metrics in the table of precisions."""
WITNESSED = 10
"""Updates in which two starts are compared."""
GAIN = 0.95
"""A share of the time that is worth another precision."""
CLOSE = 0.02
"""A share of the loss that counts as equal, where two seeds agree even more."""
SHORT = 600.0
"""Seconds of a whole run for which a CPU is enough, whatever a GPU takes."""
NEAR = 1.5
"""A CPU that takes up to so many times as long is enough."""
BUSY = 1.5
"""Processes for each core that want to run, from which on times say little."""
NOTABLE = 0.2
"""A share of an update that is worth a line."""


def why(error: Exception) -> str:
    """What an error says, in a line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


# -- precision --------------------------------------------------------------------------------------------------------


def precision(run: PlannedRun, step: RoadStep) -> None:
    """The same short training in each precision, beside a second seed in float32, which says what is noise."""
    if not all(p.dtype is torch.float32 for p in run.task.parameters() if p.is_floating_point()):
        raise NotAffordable("The task computes in short types itself, so there is nothing to choose")
    choices = [name for name in PRECISIONS if run.device.type == "cuda" or name not in OF_GPUS]
    updates = run.affords(TRAINED, FEWEST, runs=len(choices) + 1)
    rows: dict[str, UpdatePace] = {}
    left_out: dict[str, str] = {}
    for name in choices:
        try:
            rows[name] = run.pace(updates, put=PRECISIONS[name](), without=("autocast", "backends"))
        except Exception as error:
            left_out[name] = why(error)
    for name, reason in left_out.items():
        step.add("note", f"left out: {name}", reason, "It may be faster than what was compared.")
    if "float32" not in rows:
        return
    base = rows["float32"]
    second = run.pace(updates, without=("autocast", "backends"), seed=run.seed + 1)
    shown = list(base.figures)[:SHOWN]
    metric, loss = next(iter(base.figures.items()))
    noise = max(abs(second.figures[metric] - loss), CLOSE * abs(loss))
    grid = Grid([f"after {counted(updates, 'update')}", "ms/update", "samples/s", "memory", *shown], [])
    for name, row in [*rows.items(), ("another seed", second)]:
        memory = "" if row.memory is None else format_bytes(row.memory)
        figures = [f"{row.figures[name]:.4g}" for name in shown]
        grid.rows.append([name, f"{1e3 * row.seconds:.3g}", f"{row.rate:,.0f}", memory, *figures])
    step.grids.append(grid)
    step.facts = {name: {"ms": 1e3 * row.seconds, "memory": row.memory, **row.figures} for name, row in rows.items()}
    losses = {name: row.figures[metric] for name, row in rows.items()}
    sound = [name for name, found in losses.items() if math.isfinite(found) and found <= loss + noise]
    best = min(sound, key=lambda name: rows[name].seconds, default="float32")
    plain = min(base.seconds, second.seconds)
    best = best if rows[best].seconds < GAIN * plain else "float32"
    has = next((getattr(plugin, "dtype", "") for plugin in run.stack if "autocast" in plugin.provides), "float32")
    alone = "" if len(choices) == len(PRECISIONS) else f" ({' and '.join(OF_GPUS)} are for GPUs)"
    words = f"no other precision is faster here and learns as well{alone}"
    if best != "float32":
        gain = plain / rows[best].seconds
        words = f"{gain:.2f} times as fast as float32, and the loss differs by no more than {noise:.2g}, the noise"
    step.facts |= {"take": best, "has": has}
    risk = "A short training does not show what rounding does in a long one."
    step.add("good" if best == has else "note", f"take {best}", f"{words}; your stack has {has}", risk)
    for name in [name for name in rows if name not in sound]:
        level = "warning" if name == has else "note"
        evidence = f"{metric} is {losses[name]:.4g}, and {loss:.4g} in float32"
        step.add(level, f"{name} learns worse", evidence, "The loss is the price of its speed.")


# -- device -----------------------------------------------------------------------------------------------------------


def device(run: PlannedRun, step: RoadStep) -> None:
    """The planned run on its device, beside the CPU; what all of it will take, and its price."""
    kind = run.device.type
    found = {kind: run.as_planned}
    if kind != "cpu":
        try:
            few = run.pace(FEWEST, device="cpu")
            found["cpu"] = few if few.seconds > 0.05 else run.pace(TRAINED, device="cpu")
        except Exception as error:  # a stack may need the GPU
            step.add("note", "the CPU was not compared", why(error), "Whether a CPU is enough is not known.")
    whole = {name: _whole(run, row) for name, row in found.items()}
    priced = run.price is not None
    grid = Grid(["device", "updates/s", "an epoch", "the whole run", *(["price"] if priced else [])], [])
    for name, row in found.items():
        epoch = "" if row.per_epoch is None else duration(row.per_epoch * row.seconds)
        cells = [name, f"{1 / row.seconds:,.1f}", epoch, _duration(whole[name])]
        grid.rows.append([*cells, *([_price(run, whole[name])] if priced else [])])
    step.grids.append(grid)
    step.facts = {"seconds": whole, "updates_per_s": {name: 1 / row.seconds for name, row in found.items()}}
    total, cpu = whole[kind], whole.get("cpu")
    price = f", which costs {_price(run, total)}" if priced and total is not None else ""
    risk = "Measured on the machine as it is now; saves and logs come on top."
    step.add("good", "what the whole run takes", f"{_duration(total)} on {kind}{price}", risk)
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, available_cores()
    if load > BUSY * cores:
        evidence = f"a load of {load:.0f} on {counted(cores, 'core')}"
        risk = "Times of this page are too long; shares may be wrong too."
        step.add("note", "others use this machine", evidence, risk)
    if cpu is not None and total is not None and (cpu < SHORT or (kind != "cpu" and cpu < NEAR * total)):
        evidence = ", ".join(f"{_duration(seconds)} on {name}" for name, seconds in whole.items())
        risk = "A GPU that waits costs as much as one that works: device=cpu."
        step.add("good" if kind == "cpu" else "note", "a CPU is enough", evidence, risk)
    elif kind == "cpu":
        step.add("note", "no GPU was compared", "the run is on the CPU", "A GPU may be faster, or no faster at all.")


def _whole(run: PlannedRun, row: UpdatePace) -> float | None:
    """Seconds of all updates and validations of the planned run; None if its length is unknown."""
    plan = run.plan
    lengths = [plan.get("max_updates"), row.per_epoch and plan.get("max_epochs") and row.per_epoch * plan["max_epochs"]]
    updates = min((length for length in lengths if length), default=None)
    if updates is None:
        return None
    every, val = plan.get("validate_every", "1 epoch"), run.loaders["val"]
    given = list(val.values()) if isinstance(val, dict) else [val] * (val is not None)
    sizes = [length_of(loader) for loader in given]
    if not every or not row.per_epoch or None in sizes:
        return updates * row.seconds
    each = Interval(every)
    per = {"update": each.count, "epoch": each.count * row.per_epoch, "sample": each.count / max(1.0, row.samples)}
    validations = updates // max(1, per.get(each.unit, each.count / row.seconds))
    return updates * row.seconds + validations * sum(size or 0 for size in sizes) * row.validation


def _duration(seconds: float | None) -> str:
    return "unknown: the plan or the loader has no length" if seconds is None else duration(seconds)


def _price(run: PlannedRun, seconds: float | None) -> str:
    price = (seconds or 0) / 3600 * (run.price or 0)
    return "" if seconds is None else f"{price:,.2f}" if price >= 0.01 else "less than 0.01"


# -- speed ------------------------------------------------------------------------------------------------------------


def speed(run: PlannedRun, step: RoadStep) -> None:
    """Where the time of an update goes, and what `forge tune speed` would try."""
    row = run.as_planned
    waits = row.waited / row.seconds
    of = f"{1e3 * row.waited:.3g} ms of {1e3 * row.seconds:.3g} ms are waited for batches, {waits:.0%}"
    risk = "Later batches may be slower than the first, as on a cold disk."
    if waits > NOTABLE:
        risk = "The device idles for that long: more workers, or a cheaper transform (forge tune workers)."
        if is_live(run.train):
            risk = "The model collects for that long: more passes over a collection, or a cheaper one, help."
    step.add("note" if waits > NOTABLE else "good", "the loader's share", of, risk)
    host = 0.0
    of, risk = "the CPU is the device", "Other processes on this machine take from it."
    if row.device_seconds is not None:
        host = max(0.0, 1 - waits - row.device_seconds / row.seconds)
        of = f"the GPU works for {1e3 * row.device_seconds:.3g} ms of {1e3 * row.seconds:.3g} ms; the host: {host:.0%}"
        risk = "The GPU is the limit: only less work, or a shorter precision, is faster."
    if host > NOTABLE:
        risk = "The GPU waits for Python: -p cuda_graph or -p compile, or larger batches."
    step.add("note" if host > NOTABLE else "good", "the host's share", of, risk)
    step.facts = {"loader_share": waits, "device_seconds": row.device_seconds}
    try:
        plan = ("run_dir", "resume", "max_epochs", "max_updates", "validate_every")
        options = {key: value for key, value in run.settings.items() if key not in plan}
        plugins = run.plugins if run.plugins is not None else {}
        found = forge.tuning.speed_levers(run.copy, lambda: run.train, plugins=plugins, **options)
    except (AttributeError, forge.ForgeError) as error:
        step.add("note", "levers of speed", why(error), "What might be faster is not known.")
        return
    levers = [f"{lever.name} ({lever.numbers})" for lever in found if not lever.why_not]
    step.facts["levers"] = levers
    tries = f"forge tune speed would try {', '.join(levers)}" if levers else "nothing that applies here is left to try"
    risk = "Each is measured before it is taken; in brackets, what it may do to numbers."
    step.add("good", "levers of speed", tries, risk)


# -- determinism ------------------------------------------------------------------------------------------------------


def determinism(run: PlannedRun, step: RoadStep) -> None:
    """Two starts, compared tensor by tensor; and what deterministic algorithms would cost."""
    updates = run.affords(WITNESSED, 2, runs=4)
    files = [run.scratch / f"start-{number}.jsonl" for number in (1, 2)]
    for file in files:
        trainer = run.short(updates, put=[Witness(file, updates)], validate_every=None)
        seed_all(run.seed)
        task, train = run.remake() if run.remake is not None else (run.copy(), run.train)
        trainer.fit(task, train)
    one, other = map(read_trace, files)
    found = compare(one, other)
    step.facts = {"equal": found is None}
    if found is None:
        values = sum(len(line["events"]) for line in one)
        words = f"{values:,} values of {updates} updates are the same bit for bit"
        step.add("good", "two starts agree", words, "Both were in one process: forge determinism starts two.")
    else:
        risk = "A result cannot be had again, and no resume is exact: forge determinism names causes."
        step.add("warning", "two starts differ", f"{found}", risk)
    what, updates = "what deterministic algorithms cost", run.affords(TRAINED, FEWEST, runs=3)
    try:  # between two without, whose difference is the noise
        first, exact, last = (run.pace(updates, deterministic=on).seconds for on in (False, True, False))
    except Exception as error:
        step.add("note", what, why(error), "trainer.deterministic=true is refused for this task.")
        return
    step.facts["deterministic_cost"] = cost = 2 * exact / (first + last)
    words = f"{1e3 * exact:.3g} ms per update; {1e3 * first:.3g} and {1e3 * last:.3g} ms without"
    noise = abs(first - last) / (first + last) + 1 - GAIN
    words += f": {cost:.2f} times" if abs(cost - 1) > noise else ", so nothing that can be measured"
    need = "They may make two starts agree: trainer.deterministic=true."
    step.add("good", what, words, "They are not needed here." if found is None else need)
