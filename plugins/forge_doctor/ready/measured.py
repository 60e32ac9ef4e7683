"""Steps that measure: precisions, devices, the shares of host and loader, and whether two starts agree."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

import forge
from forge.contract.plugin import Plugin
from forge.data.accumulation_windows import length_of
from forge.progress import Interval
from forge.rng import seed_all
from forge.runs.wording import counted, duration
from forge.testing.trace import read_trace
from forge.tuning.workers import available_cores
from forge.util.text import format_bytes
from forge_doctor.ready.planned_run import NotAffordable, PlannedRun, UpdatePace
from forge_doctor.ready.report import Grid, RoadStep
from forge_doctor.witness import Witness, compare
from forge_plugins import AMP, Backends

TRAINED, FEWEST = 100, 10
"""Updates of each measurement, and the fewest."""
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
AS_PLANNED = "as planned"


def _why(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


# -- precision --------------------------------------------------------------------------------------------------------


def _precisions(device: str) -> dict[str, Callable[[], list[Plugin]] | str]:
    """What to put into the stack for each precision, or why it is left out here."""
    gpu = device == "cuda"
    no_gpu = "it is for GPUs, and this run is on the CPU"
    return {
        "float32": list,
        "tf32": (lambda: [Backends(tf32=True)]) if gpu else no_gpu,
        "bf16": lambda: [AMP(dtype="bf16")],
        "fp16": (lambda: [AMP(dtype="fp16")]) if gpu else "few CPUs compute in fp16",
    }


def precision(run: PlannedRun, step: RoadStep) -> None:
    """The same short training in each precision, beside a second seed in float32, which says what is noise."""
    if not all(p.dtype is torch.float32 for p in run.task.parameters() if p.is_floating_point()):
        raise NotAffordable("the task computes in short types itself, so there is nothing to choose")
    choices = _precisions(run.device.type)
    tried = {name: make for name, make in choices.items() if callable(make)}
    updates = run.affords(TRAINED, FEWEST, runs=len(tried) + 1)
    rows: dict[str, UpdatePace] = {}
    refused: dict[str, str] = {}
    for name, make in tried.items():
        try:
            rows[name] = run.pace(updates, put=make(), without=("autocast", "backends"))
        except Exception as error:
            refused[name] = _why(error)
    for name, why in [*((n, w) for n, w in choices.items() if isinstance(w, str)), *refused.items()]:
        step.add("note", f"{name} was left out", why, "It was not compared.")
    if "float32" not in rows:
        return
    base = rows["float32"]
    second = run.pace(updates, without=("autocast", "backends"), seed=run.seed + 1)
    metric, loss = base.loss
    noise = max(abs(second.loss[1] - loss), CLOSE * abs(loss))
    heads = ["precision", "ms per update", "samples per second", "memory", f"{metric} after {updates} updates"]
    step.grids.append(
        Grid(heads, [[name, *_cells(row)] for name, row in [*rows.items(), ("float32, another seed", second)]])
    )
    step.facts = {
        name: {"ms": 1e3 * row.seconds, "memory": row.memory, metric: row.loss[1]} for name, row in rows.items()
    }
    sound = {name: row for name, row in rows.items() if math.isfinite(row.loss[1]) and row.loss[1] <= loss + noise}
    best = min(sound, key=lambda name: sound[name].seconds, default="float32")
    plain = min(base.seconds, second.seconds)
    best = best if best in sound and sound[best].seconds < GAIN * plain else "float32"
    has = next((plugin.precision for plugin in run.stack if plugin.precision), "float32")
    gain = plain / rows[best].seconds
    words = {"float32": "no other precision is faster here and learns as well"}.get(
        best, f"{gain:.2f} times as fast as float32, and the loss differs by no more than {noise:.2g}, the noise"
    )
    step.facts |= {"take": best, "has": has}
    risk = "A short training does not show what rounding does in a long one."
    step.add("good" if best == has else "note", f"take {best}", f"{words}; your stack has {has}", risk)
    for name in rows.keys() - sound.keys():
        level = "warning" if name == has else "note"
        evidence = f"{metric} is {rows[name].loss[1]:.4g}, and {loss:.4g} in float32"
        step.add(level, f"{name} learns worse", evidence, "The loss is the price of its speed.")


def _cells(row: UpdatePace) -> list[str]:
    memory = "" if row.memory is None else format_bytes(row.memory)
    return [f"{1e3 * row.seconds:.3g}", f"{row.rate:,.0f}", memory, f"{row.loss[1]:.4g}"]


# -- device -----------------------------------------------------------------------------------------------------------


def _as_planned(run: PlannedRun) -> UpdatePace:
    """The planned stack on the planned device, measured once."""
    if AS_PLANNED not in run.paces:
        run.paces[AS_PLANNED] = run.pace(run.affords(TRAINED, FEWEST))
    return run.paces[AS_PLANNED]


def device(run: PlannedRun, step: RoadStep) -> None:
    """The planned run on its device, beside the CPU; what all of it will take, and its price."""
    kind = run.device.type
    found = {kind: _as_planned(run)}
    if kind == "cuda":
        _beside(run, step, found)
    else:
        step.add(
            "note", "no GPU was compared", f"the run is on the {kind}", "A GPU may be faster, or no faster at all."
        )
    rows, whole = [], {}
    for name, row in found.items():
        epoch = None if row.per_epoch is None else row.per_epoch * row.seconds
        whole[name] = _whole(run, row)
        cells = [name, f"{1 / row.seconds:,.1f}", "" if epoch is None else duration(epoch), _duration(whole[name])]
        rows.append([*cells, *([_price(run, whole[name])] if run.price is not None else [])])
    heads = ["device", "updates per second", "an epoch", "the whole run"]
    step.grids.append(Grid([*heads, *(["price"] if run.price is not None else [])], rows))
    step.facts = {"seconds": whole, "updates_per_s": {name: 1 / row.seconds for name, row in found.items()}}
    total, cpu = whole[kind], whole.get("cpu")
    price = f", which costs {_price(run, total)}" if run.price is not None and total is not None else ""
    risk = "Measured on the machine as it is now; saves and logs come on top."
    step.add("good", "what the whole run takes", f"{_duration(total)} on {kind}{price}", risk)
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, available_cores()
    if load > BUSY * cores:
        evidence = f"a load of {load:.0f} on {counted(cores, 'core')}"
        step.add(
            "note", "others use this machine", evidence, "Times of this page are too long; shares may be wrong too."
        )
    if kind == "cuda" and cpu is not None and total is not None and (cpu < SHORT or cpu < NEAR * total):
        evidence = f"{_duration(cpu)} on the CPU, {_duration(total)} on the GPU"
        step.add("note", "a CPU is enough", evidence, "A GPU that waits costs as much as one that works: device=cpu.")


def _beside(run: PlannedRun, step: RoadStep, found: dict[str, UpdatePace]) -> None:
    """Measure the same on the CPU; a stack may need the GPU."""
    try:
        few = run.pace(FEWEST, device="cpu")
        found["cpu"] = few if few.seconds > 0.05 else run.pace(TRAINED, device="cpu")
    except Exception as error:
        step.add("note", "the CPU was not compared", _why(error), "Whether a CPU is enough is not known.")


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
    return "" if seconds is None or run.price is None else f"{seconds / 3600 * run.price:,.2f}"


# -- speed ------------------------------------------------------------------------------------------------------------


def speed(run: PlannedRun, step: RoadStep) -> None:
    """Where the time of an update goes, and what `forge tune speed` would try."""
    row = _as_planned(run)
    waits = row.waited / row.seconds
    of = f"{1e3 * row.waited:.3g} ms of {1e3 * row.seconds:.3g} ms are waited for batches, {waits:.0%}"
    risk = "Later batches may be slower than the first, as on a cold disk."
    if waits > NOTABLE:
        risk = "The device idles for that long: more workers, or a cheaper transform (forge tune workers)."
        if getattr(run.train, "live", False):
            risk = "The model collects for that long: more passes over a collection, or a cheaper one, help."
    step.add("note" if waits > NOTABLE else "good", "the loader's share", of, risk)
    if row.device_seconds is not None:
        host = max(0.0, 1 - waits - row.device_seconds / row.seconds)
        of = f"the GPU works for {1e3 * row.device_seconds:.3g} ms of {1e3 * row.seconds:.3g} ms; the host: {host:.0%}"
        risk = (
            "The GPU waits for Python: -p cuda_graph or -p compile, or larger batches."
            if host > NOTABLE
            else ("The GPU is the limit: only less work, or a shorter precision, is faster.")
        )
        step.add("note" if host > NOTABLE else "good", "the host's share", of, risk)
    else:
        step.add("good", "the host's share", "the CPU is the device", "Other processes on this machine take from it.")
    step.facts = {"loader_share": waits, "device_seconds": row.device_seconds}
    try:
        plan = ("run_dir", "resume", "max_epochs", "max_updates", "validate_every")
        options = {key: value for key, value in run.settings.items() if key not in plan}
        plugins = run.plugins if run.plugins is not None else {}
        found = forge.tuning.speed_levers(run.copy, lambda: run.train, plugins=plugins, **options)
    except (AttributeError, forge.ForgeError) as error:
        step.add("note", "levers of speed", str(error).splitlines()[0], "What might be faster is not known.")
        return
    levers = [f"{lever.name} ({lever.numbers})" for lever in found if not lever.why_not]
    step.facts["levers"] = levers
    tries = f"forge tune speed would try {', '.join(levers)}" if levers else "nothing that applies here is left to try"
    step.add(
        "good", "levers of speed", tries, "Each is measured before it is taken; in brackets, what it may do to numbers."
    )


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
    plain = _as_planned(run)
    try:
        exact = run.pace(max(FEWEST, min(TRAINED, plain.updates)), deterministic=True)
    except Exception as error:
        step.add(
            "note", "deterministic algorithms", _why(error), "trainer.deterministic=true is refused for this task."
        )
        return
    slower = exact.seconds / plain.seconds
    step.facts["deterministic_cost"] = slower
    words = f"{1e3 * exact.seconds:.3g} ms per update, {1e3 * plain.seconds:.3g} ms without: {slower:.2f} times"
    need = (
        "They are not needed here." if found is None else "They may make two starts agree: trainer.deterministic=true."
    )
    step.add("good", "what deterministic algorithms cost", words, need)
