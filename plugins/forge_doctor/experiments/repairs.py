"""Repairs: make one small edit of the user's own code after another, and see whether the task then learns far more.

The user's own validation judges. A function of the model keeps the edit there; one that makes batches, sees the target
or computes the loss has it in training alone. A line that holds learning back is named by the edit that shows it.
"""

from __future__ import annotations

import copy
import functools
import linecache
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

from forge.contract.task import TaskModule
from forge.rng import reseed
from forge.runs.directions import mode_of
from forge.util.frames import is_library
from forge.util.text import short_path
from forge_doctor.experiments import equivariance
from forge_doctor.experiments.answers import held_of
from forge_doctor.experiments.edits import Edit, edits_of, function_of
from forge_doctor.experiments.intervene import draws, numbers, parts
from forge_doctor.experiments.reading import sides
from forge_doctor.experiments.scale import short_fit
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, OutOfTime, Patient, first, tensors
from forge_doctor.stored import collate_of, indexed

ROUNDS = ((25, 6, 0.02, 0.6), (100, 3, 0.1, 0.8))
"""Updates after which edits are compared, how many go on, by which gain at least, and the share of the time."""
LAST = 200
"""Updates of the last comparison."""
ALIKE = 0.95
"""The share of the best gain from which edits count as equal, and the plainest is reported."""
LONGER = 3
"""How many times as long the code as it is may train, and must stay behind."""
BATCHES, MOST_SAMPLES, JUDGES = 60, 2000, 6
"""Batches of train that are served, the samples in them, and batches of val that judge."""
MORE = 0.2
"""By how much more an edit must learn, as a share of the first loss or of a metric from 0 to 1."""
FIND_SHARE = 0.3
"""The share of the time for finding edits that run."""
FEWEST_UPDATES = 800
"""Updates that there must be time for: of a few edits, and of the code as it is."""
STAGES = ("train", "val", "read", "make")
"""In what order functions are edited, by where they run."""

Figures = dict[str, float]


class RunFunctions:
    """Notes which functions of the user's run in which stage, and which of them see a target or give back a loss."""

    def __init__(self) -> None:
        self.targets: list[Tensor] = []
        self.stages: dict[CodeType, set[str]] = {}
        self.functions: dict[CodeType, FunctionType | None] = {}
        self.judges: set[CodeType] = set()

    @contextmanager
    def listening(self, stage: str) -> Iterator[None]:
        def note(frame: FrameType, event: str, given: Any) -> None:
            if event not in ("call", "return") or is_others(frame.f_code.co_filename):
                return
            self.stages.setdefault(frame.f_code, set()).add(stage)
            if frame.f_code not in self.functions:
                self.functions[frame.f_code] = function_of(frame)
            if event == "call" and any(self._is_target(x) for x in tensors(list(frame.f_locals.values()))):
                self.judges.add(frame.f_code)
            if event == "return" and any(x.numel() == 1 and x.requires_grad for x in tensors(given)):
                self.judges.add(frame.f_code)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _is_target(self, x: Tensor) -> bool:
        return any(x is y or (x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)) for y in self.targets)


@functools.cache
def is_others(file: str) -> bool:
    """Whether a source file is Python's, or an installed package's."""
    return is_library(file) or file.startswith(tuple(sysconfig.get_path(x) for x in ("stdlib", "purelib", "platlib")))


class EditTrials:
    """Trains tasks with an edit, and asks their own validation."""

    def __init__(self, patient: Patient):
        self.patient, self.ran = patient, RunFunctions()
        self.val = patient.trainer.env.move(first(patient.loaders["val"], JUDGES))
        with self.ran.listening("make"):
            self.task = self._made()
        with self.ran.listening("read"):
            self._read(1)
        self.batches = self._read()
        targets, both = _targets(patient), [parts(batches[0]) for batches in (self.batches, self.val)]
        self.ran.targets = [batch[path] for batch in both for path in targets & batch.keys()]
        with self.ran.listening("train"):
            self._fitted(self.batches[:1], None)
        began = time.perf_counter()
        self._fitted(self.batches[:1] * 5, None)
        self.seconds = (time.perf_counter() - began) / 5
        "That an update takes, about."
        with self.ran.listening("val"):
            self.start = self.validate(copy.deepcopy(self.task))
        self.is_fixed = bool(targets) and targets <= both[1].keys() and not draws(patient, "val", self.val[0])
        "Whether the question of validation is known, and no edit of the model can change it."

    def _made(self) -> TaskModule:
        reseed(SEED)
        return self.patient.remake() if self.patient.remake is not None else self.patient.fresh()

    def _read(self, most: int = BATCHES) -> list[Any]:
        """Batches of train, of the same samples each time where they can be read by index."""
        loader = self.patient.train
        collate, dataset, size = collate_of(loader), indexed(loader), int(getattr(loader, "batch_size", None) or 0)
        if dataset is None or collate is None or not 0 < size <= len(dataset):
            reseed(SEED)
            return self.patient.trainer.env.move(first(loader, most))
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(SEED)).tolist()
        found = []
        for i in range(0, min(most * size, max(size, MOST_SAMPLES), len(dataset) - size + 1), size):
            reseed(SEED + i)
            found.append(collate([dataset[k] for k in order[i : i + size]]))
        return self.patient.trainer.env.move(found)

    def _served(self, edit: Edit | None, most: int = BATCHES) -> list[Any]:
        """Batches of train with an edit of what reads them."""
        return self._read(most) if "read" in self.stages(edit) else self.batches[:most]

    def stages(self, edit: Edit | None) -> set[str]:
        return self.ran.stages[edit.own] if edit is not None else set()

    def is_models(self, code: CodeType) -> bool:
        """Whether a function is one of the model, which validation runs too."""
        return "val" in self.ran.stages[code] and code not in self.ran.judges

    def _is_fair(self, code: CodeType) -> bool:
        """Whether validation asks the same with an edit of this function: a model may make its question itself."""
        return self.is_fixed or not (self.is_models(code) or "make" in self.ran.stages[code])

    def _fitted(self, batches: list[Any], edit: Edit | None) -> tuple[TaskModule, list[float]]:
        return short_fit(
            self.patient, batches, task=self._made() if "make" in self.stages(edit) else copy.deepcopy(self.task)
        )

    def validate(self, task: Any) -> Figures:
        task.to(self.patient.device).trainer = self.patient.trainer
        task.eval()
        said: dict[str, list[float]] = {}
        with torch.no_grad():
            for batch in copy.deepcopy(self.val):
                for name, value in numbers(self.patient.run(task, batch, "val")).items():
                    said.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in said.items()}

    def edits(self, is_over: Callable[[], bool]) -> list[Edit]:
        """The edits that run, the plainest of those that do the same; other names come last."""
        found: dict[tuple[float, ...], Edit | None] = {self._effect(None): None}
        stages = self.ran.stages
        order = sorted(filter(self._is_fair, stages), key=lambda code: min(map(STAGES.index, stages[code])))
        for names in (False, True):
            for edit in (edit for code in order for edit in edits_of(self.ran.functions[code], names)):
                if is_over():
                    break
                with suppress(Exception):  # most of them break the step
                    effect = self._effect(edit)
                    known = found.setdefault(effect, edit)
                    if known is not None and edit.rank < known.rank:
                        found[effect] = edit
        return [edit for effect, edit in found.items() if edit is not None and all(map(math.isfinite, effect))]

    def _effect(self, edit: Edit | None) -> tuple[float, ...]:
        """Numbers that tell what an edit does to two updates: their losses, and the weights after them."""
        with edit.made() if edit is not None else nullcontext():
            task, losses = self._fitted(self._served(edit, 1) * 2, edit)
        weights = [float(p.detach().double().sum()) for p in task.parameters()]
        return (*losses, sum((i + 1) * x for i, x in enumerate(weights)))

    def figures(self, edit: Edit | None, updates: int, shift: int = 0) -> Figures:
        """What validation says after so many updates with an edit."""
        with edit.made() if edit is not None else nullcontext():
            batches = self._served(edit)
            task, _ = self._fitted([batches[(i + shift) % len(batches)] for i in range(updates)], edit)
        with edit.made() if edit is not None and self.is_models(edit.own) else nullcontext():
            return self.validate(task)

    def base(self, updates: int, shift: int = 0) -> Figures:
        """The best that validation says of the code as it is, after as many updates and after several times as many."""
        one, other = (self.figures(None, n, shift) for n in (updates, LONGER * updates))
        return {name: _better(name, one[name], other[name]) for name in one}

    def gain(self, base: Figures, now: Figures) -> tuple[float, str]:
        """By how much more is learnt, of what there is to learn, and by which figure."""
        found = ((_gain(n, self.start.get(n, math.nan), base[n], now.get(n, math.nan)), n) for n in base)
        return max(found, default=(0.0, ""))


def _targets(patient: Patient) -> set[str]:
    """Where the tensors of a batch stand that the answers of the model do not depend on."""
    batch = patient.batches[0]
    held = held_of(patient, batch)
    asked, told = sides(held) if held is not None else ([], [])
    is_answers = lambda x: any(x is y for y in asked) if asked else all(x is not y for y in told)  # noqa: E731
    return {path for path, x in parts(batch).items() if x.ndim and not is_answers(x)}


def _better(name: str, one: float, other: float) -> float:
    return max(one, other) if _mode(name) == "max" else min(one, other)


def _mode(name: str) -> str | None:
    return "min" if name == "loss" else mode_of(name)


def _gain(name: str, start: float, base: float, now: float) -> float:
    if _mode(name) is None or not all(map(math.isfinite, (start, base, now))):
        return 0.0
    if _mode(name) == "min":
        return (base - now) / max(abs(start), abs(base), 1e-9)
    return now - base if min(start, base, now) >= 0 and max(start, base, now) <= 1 else 0.0


def repairs(patient: Patient) -> Iterator[Finding]:
    """Make edits of each function that runs, and name the one after which validation is far better."""
    if not patient.can_validate or len(patient.names) > 1:
        return
    within, trials = patient.within, EditTrials(patient)
    if trials.seconds * FEWEST_UPDATES > within.left:
        raise OutOfTime
    edits = trials.edits(lambda: within.spent > FIND_SHARE * within.seconds)
    for updates, kept, least, share in ROUNDS:
        base, scored, part = trials.base(updates), list[tuple[float, Edit]](), within.part(share)
        for edit in edits:
            if part.is_over:
                break
            with suppress(Exception):
                scored.append((trials.gain(base, trials.figures(edit, updates))[0], edit))
        edits = [edit for gain, edit in sorted(scored, key=lambda one: -one[0])[:kept] if gain > least]
    if edits and not within.is_over:
        yield from _told(patient, trials, edits)


def _told(patient: Patient, trials: EditTrials, edits: list[Edit]) -> Iterator[Finding]:
    """Compare once more, for longer and in another order; an edit must not let a model see what it is to predict."""
    base, scored = trials.base(LAST, shift=7), list[tuple[float, str, Figures, Edit]]()
    for edit in edits:
        now = trials.figures(edit, LAST, shift=7)
        scored.append((*trials.gain(base, now), now, edit))
    best = max(gain for gain, *_ in scored)
    if best < MORE:
        return
    _, name, now, edit = min((one for one in scored if one[0] > ALIKE * best), key=lambda one: one[3].rank)
    if trials.is_models(edit.own):
        with edit.made():
            if any(True for _ in equivariance.answers_seen(patient)):
                return
    file = edit.own.co_filename
    text = (
        f"In `{linecache.getline(file, edit.line).strip()}`, {edit}: {LAST} updates take the {name} of validation from "
        f"{trials.start[name]:.4g} to {now[name]:.4g}. As the code is, {LONGER * LAST} take it to {base[name]:.4g}."
    )
    evidence = {"start": trials.start[name], "with the edit": now[name], "as it is": base[name]}
    yield Finding("line_holds_back", text, f"{short_path(file)}:{edit.line}", evidence)
