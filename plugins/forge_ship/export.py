"""Export a trained task to a file that runs elsewhere, and prove that the file computes what the task computes."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from forge import registry
from forge.checkpoint.weights import describe_task
from forge.contract.task import TaskModule
from forge.data import Splits
from forge.runs.trained_task import Source, data_of, find
from forge.util.files import make_folder
from forge_ship import card, verify
from forge_ship import quantize as quantisation
from forge_ship.engine import ExportError, Port
from forge_ship.export_formats import formats, module_of
from forge_ship.export_formats.plan import Plan, quiet, traced
from forge_ship.interface import Deployed, Interface, dynamic_axes, observe, ports_of, with_batch
from forge_ship.operators import libraries_of
from forge_ship.runner import Remote
from forge_ship.structure import flat, plain

TF32 = 1e-3
"""The least tolerance on a GPU."""
LOOSE = 5e-2
"""The least tolerance between a quantised model and its export: rounding may go to the next of 256 levels."""


@dataclass
class Export:
    """A file that was exported, and its card."""

    path: Path
    card: dict[str, Any]
    notes: list[str] = field(default_factory=list)


@dataclass
class Prepared:
    """A task with what was seen of it: ready to be written in any format."""

    source: Source
    interface: Interface
    axes: dict[str, dict[int, str]]
    loader: Any
    device: str
    batches: int | None
    note: str = ""

    def plan(self, structured: bool = False) -> Plan:
        """Return a plan whose example has at least two rows: torch would take a single one as fixed."""
        model = Deployed(self.source.task, self.interface, plain if structured else flat).eval()
        call = max(
            self.interface.calls, key=lambda each: min((size for sizes in each.sizes for size in sizes), default=2)
        )
        inputs = call.inputs
        if any("batch" in symbols.values() for symbols in self.axes.values()):
            rows = next(iter(inputs.values())).shape[0]
            inputs = with_batch(call, self.axes, 2) if rows < 2 else inputs
        axes = {name: dict(symbols) for name, symbols in self.axes.items()}
        largest: dict[str, int] = {}
        for seen in (inputs, *(each.inputs for each in self.interface.calls)):
            for name, symbols in axes.items():
                for axis, symbol in symbols.items():
                    largest[symbol] = max(largest.get(symbol, 0), seen[name].shape[axis])
        name = type(self.source.task).__name__
        return Plan(model, dict(inputs), axes, self.interface.output_names, name, largest=largest)

    def ports(self) -> tuple[list[Port], list[Port]]:
        """Describe inputs and outputs."""
        calls = self.interface.calls
        inputs = ports_of([call.inputs for call in calls], self.axes)
        return inputs, ports_of([call.outputs for call in calls], self._output_axes())

    def _output_axes(self) -> dict[str, dict[int, str]]:
        """An axis of an output is dynamic where its size follows that of a dynamic axis of an input."""
        calls = self.interface.calls
        followed: dict[tuple[int, ...], str] = {}
        for name, symbols in self.axes.items():
            for axis, symbol in symbols.items():
                followed.setdefault(tuple(call.inputs[name].shape[axis] for call in calls), symbol)
        found: dict[str, dict[int, str]] = {}
        for name, tensor in calls[0].outputs.items():
            if any(call.outputs[name].dim() != tensor.dim() for call in calls):
                continue
            for axis in range(tensor.dim()):
                sizes = tuple(call.outputs[name].shape[axis] for call in calls)
                if sizes in followed and (axis == 0 or len(set(sizes)) > 1):
                    found.setdefault(name, {})[axis] = followed[sizes]
                elif len(set(sizes)) > 1:  # it follows from the values, as the number of boxes does
                    found.setdefault(name, {})[axis] = f"{name}_{axis}"
        return found


def export(
    task_or_run: TaskModule | str | Path,
    *,
    to: str,
    out: str | Path | None = None,
    data: Any = None,
    task: Callable[..., TaskModule] | None = None,
    weights: str | None = None,
    quantize: str | None = None,
    dynamic: str | Sequence[str] = "auto",
    device: str = "cpu",
    max_drop: float | None = None,
    batches: int | None = None,
    force: bool = False,
    merge: bool = False,
) -> Export:
    """Write a trained task in a format that `forge export --help` lists, verified against the task.

    `task_or_run` is a task, a run folder or a checkpoint in one. `out` is the file to write; for a run it defaults to
    `RUN/export/FORMAT/`. `data` is a validation loader, `forge.data.Splits` or a function that returns one; a run has
    its own. `task` is the class of a task that is not installed by name. `weights` is as for `forge.load`. `quantize`
    is a kind of `forge_ship.quantize.KINDS`. `dynamic` is "auto" (the batch, and each axis that the data vary),
    "batch", "none", or a list of INPUT:AXIS. `max_drop` refuses a loss of the metric beyond it; `batches` limits the
    validation. `merge` merges adapters into their base, as those of peft. `force` replaces what is there.
    """
    format = module_of(to)
    source = _source(task_or_run, task, weights, device)
    if merge:
        _merge(source.task)
    file = _place(source, to, format.FILE, out, quantize)
    _refuse_existing(file, force)
    prepared = prepare(source, loader_of(source, data), device, dynamic, batches)
    plan = prepared.plan(getattr(format, "STRUCTURED", False))
    libraries = libraries_of(plan.model, plan.examples)
    note = ""
    if quantize is not None:
        plan, note = _quantised(plan, quantize, to, prepared)
    with _beside(file) as folder:
        written = folder / file.name
        _write(to, format, plan, written)
        verdict = _verify(to, format, written, plan, prepared, quantize, max_drop, libraries)
        made = _card(to, prepared, plan, folder, verdict, quantize, libraries)
        card.write(made, written)
        _publish(folder, file, force)
    notes = [note] if note else []
    if prepared.interface.left_out:
        notes.append(f"left out, because they are no tensors: {', '.join(prepared.interface.left_out)}")
    notes += [
        f"{each.name} is 0 everywhere: its comparison proves little"
        for each in verdict.outputs
        if not any(call.outputs[each.name].any() for call in prepared.interface.calls)
    ]
    notes += filter(None, [verdict.metric_note, verdict.structure_note, prepared.note])
    return Export(file, made, notes)


def prepare(
    source: Source, loader: Any, device: str, dynamic: str | Sequence[str] = "auto", batches: int | None = None
) -> Prepared:
    """Validate a task, and learn what it takes and returns."""
    interface = observe(source.task, loader, device, batches)
    axes, note = dynamic_axes(interface.calls, dynamic), ""
    if dynamic == "auto" and not _takes_other_rows(source.task, interface, axes, device):
        axes = {name: {at: each for at, each in found.items() if each != "batch"} for name, found in axes.items()}
        axes = {name: found for name, found in axes.items() if found}
        note = "no axis is the batch: the task itself fails with another size of its first"
    return Prepared(source, interface, axes, loader, device, batches, note)


def _takes_other_rows(task: TaskModule, interface: Interface, axes: Mapping[str, Any], device: str) -> bool:
    """Whether a task takes another number of rows; the first axis of a single image is its channels."""
    call = interface.calls[0]
    sizes = [
        call.inputs[name].shape[at] for name, found in axes.items() for at, each in found.items() if each == "batch"
    ]
    try:
        return not sizes or bool(
            verify.run(Deployed(task, interface).eval(), with_batch(call, axes, sizes[0] + 1), device)
        )
    except Exception:  # of any kind: the task is the user's
        return False


def _source(given: Any, task: Callable[..., TaskModule] | None, weights: str | None, device: str) -> Source:
    if isinstance(given, TaskModule):
        own = copy.deepcopy(given)  # modes and devices of the caller's task stay as they are
        return Source(own.to(device).eval())
    found = find(given, task, weights)
    found.task.to(device)
    return found


def _merge(task: TaskModule) -> None:
    """Replace each part that can merge its adapters into its base by what it makes of them."""
    found = [name for name, module in task.named_modules() if name and hasattr(module, "merge_and_unload")]
    if not found:
        raise ExportError(f"--merge: {type(task).__name__} has no model with adapters to merge, as peft makes them.")
    for name in found:
        if not any(name.startswith(f"{outer}.") for outer in found):
            outer, _, last = name.rpartition(".")
            setattr(task.get_submodule(outer), last, task.get_submodule(name).merge_and_unload())  # pyright: ignore


def loader_of(source: Source, data: Any) -> Any:
    """Return the validation loader of the data that are given, else of the run's own."""
    if callable(data) and not hasattr(data, "__iter__"):
        data = data()
    if data is None:
        if source.path is None:
            raise ExportError(
                "An export is verified on validation data: give data=..., a loader or forge.data.Splits (--data "
                "FILE.py:function on the command line)."
            )
        data = data_of(source.path)
    if not isinstance(data, Splits):
        return data
    loader = data.val if data.val is not None else data.test
    if loader is None:
        raise ExportError("The data have neither a val nor a test split, so an export cannot be verified.")
    return loader


# -- where it goes ----------------------------------------------------------------------------------------------------


def _place(source: Source, to: str, name: str, out: str | Path | None, quantize: str | None) -> Path:
    if out is None:
        if source.path is None:
            raise ExportError(f"Name the file to write, as in out='{name}'.")
        return source.path / "export" / "-".join([to, *([quantize] if quantize else [])]) / name
    path = Path(out)
    suffix = "".join(Path(name).suffixes)
    if path.is_dir() or not path.suffix:
        return path / name
    if not path.name.endswith(Path(name).suffix):
        raise ExportError(f"{path}: a file of the format {to} ends in {suffix}. Name it {path.with_suffix(suffix)}.")
    return path


def _refuse_existing(file: Path, force: bool) -> None:
    there = [path for path in (file, card.place_of(file)) if path.exists()]
    if there and not force:
        raise ExportError(
            f"{there[0]} is there already, and was kept. Name another with --out, or replace it: --force."
        )


def _write(to: str, format: Any, plan: Plan, file: Path) -> None:
    with quiet(), registry.blamed("format", to, f"write {file.name}"):
        format.write(plan, file)
        if not file.exists():
            raise FileNotFoundError("write returned, and the file is not there")


@contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """A folder beside the place of the file, which is removed in the end with all that is left in it; so are folders
    that were made for nothing."""
    made = list(takewhile(lambda path: not path.exists(), file.parents))
    make_folder(file.parent)
    folder = Path(tempfile.mkdtemp(prefix=".export-", dir=file.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the first that holds something
            for path in made:
                path.rmdir()


def _publish(folder: Path, file: Path, force: bool) -> None:
    _refuse_existing(file, force)
    for path in sorted(folder.iterdir(), key=card.is_card):  # the card comes last
        target = file.parent / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


# -- what is proved ---------------------------------------------------------------------------------------------------


def _verify(
    to: str,
    format: Any,
    written: Path,
    plan: Plan,
    prepared: Prepared,
    quantize: str | None,
    max_drop: float | None,
    libraries: Sequence[str],
) -> verify.ExportVerdict:
    """Run the file in a fresh process, and compare outputs and metrics; of weights alone, the weights."""
    inputs, outputs = prepared.ports()
    with Remote(to, written, inputs, outputs, prepared.device, libraries) as remote:
        if getattr(format, "WEIGHTS_ONLY", False):
            return verify.compare_weights(remote.weights, prepared.source.task, format.TOLERANCE)
        verdict = verify.compare_outputs(
            remote,
            plan.model,
            prepared.interface,
            prepared.axes,
            _tolerance(format.TOLERANCE, prepared.device, quantize),
            prepared.device,
            plan.limits,
            is_recorded=quantize is None,
        )
        task, interface = prepared.source.task, prepared.interface
        verify.compare_metrics(verdict, task, interface, remote, prepared.loader, prepared.device, prepared.batches)
        if getattr(format, "STRUCTURED", False):
            verdict.structure_note = verify.compare_structure(
                remote.returned, interface.returns, interface.output_names
            )
    if quantize is None:
        verify.refuse_other_metrics(verdict)
    if max_drop is not None:
        verify.refuse_drop(verdict, max_drop)
    return verdict


def _tolerance(tolerance: float, device: str, quantize: str | None) -> float:
    """Return the relative difference that is allowed: more on a GPU, whose convolutions round to TF32."""
    least = LOOSE if quantize is not None else TF32 if device.startswith("cuda") and tolerance else 0.0
    return max(tolerance, least)


def _quantised(plan: Plan, kind: str, to: str, prepared: Prepared) -> tuple[Plan, str]:
    """Return a plan of the quantised model, and a note on where its ranges come from."""
    if getattr(module_of(to), "WEIGHTS_ONLY", False):
        raise ExportError(f"--quantize needs a format with a program, such as pt2 or onnx; {to} holds weights alone.")
    reason = quantisation.refusal(kind, plan.model, prepared.device, to)
    if reason is not None:
        raise ExportError(reason)
    traced(plan)  # finds what torch refuses, and the limits of dynamic axes
    state = prepared.source.plugins.get("qat") if kind == "int8-static" else None
    ranges = quantisation.ranges_of(state, "task.") if state else None
    calls = prepared.interface.calls
    examples = [tuple(call.inputs.values()) for call in calls]
    try:
        model = quantisation.quantize(
            plan.model,
            kind,
            [plan.examples, *examples],
            dynamic_shapes=plan.shapes(),
            device=prepared.device,
            ranges=ranges,
        )
    except (AssertionError, RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ExportError(f"--quantize {kind}: torchao cannot quantise the model: {reason[0]}") from error
    note = ""
    if kind == "int8-static":
        note = "ranges learnt by qat" if ranges else f"ranges found on {len(calls)} validation batches"
    share = quantisation.weight_bytes(model) / quantisation.weight_bytes(plan.model)
    return replace(plan, model=model), "; ".join(filter(None, [note, f"weights take {share:.3f} of the float bytes"]))


def _card(
    to: str,
    prepared: Prepared,
    plan: Plan,
    folder: Path,
    verdict: verify.ExportVerdict,
    quantize: str | None,
    libraries: Sequence[str],
) -> dict[str, Any]:
    source, (inputs, outputs) = prepared.source, prepared.ports()
    described = describe_task(source.task) if hasattr(source.task, "init_args") else {}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not card.is_card(path))
    return {
        "version": card.VERSION,
        "format": to,
        "about": formats()[to],
        "task": described,
        "run": source.run or None,
        "update": source.update,
        "weights": source.weights,
        "method": prepared.interface.method,
        "quantize": quantize,
        "device": prepared.device,
        "inputs": [card.port_as_dict(port) for port in inputs],
        "outputs": [card.port_as_dict(port) for port in outputs],
        "returns": prepared.interface.returns,
        "libraries": libraries,
        "limits": {name: list(limits) for name, limits in plan.limits.items()},
        "files": {str(path.relative_to(folder)): card.hashed(path) for path in files},
        "verification": asdict(verdict),
        "versions": card.versions(libraries),
    }
