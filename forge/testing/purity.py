"""Check of purity: under observers a user's code sees what the bare loop shows.

A spying task, its data and its optimizer write down everything that they see of a run, in order: calls of their methods
and of hooks of every kind, samples that are asked for, random numbers, and what the process shares (environment,
warnings, signals, hooks on all modules). The files of the working directory are compared as well. What a plugin
declares in `effects` is its work, and is left out. A copy of the task may do what it likes, without the hooks of the
original.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from forge.contract.plugin import Plugin
from forge.engine.trainer import Trainer
from forge.testing.process_flags import changed_flags, read_flags
from forge.testing.subject import Subject
from forge.testing.tiny import CLASSES, FEATURES, TinyTask
from forge.twin.compare import Difference, first_difference
from forge.twin.record import Record

UPDATES, BATCH, SAMPLES = 8, 16, 80
"""The run: into the second epoch, with a validation between them."""
RUN, FILES = "run", "the files"
BLIND_TO = {"state_dict": "state_dict", "reads_ahead": "sample", "evaluates": "evaluation"}
"""An effect, and the kind of what is seen of it."""
COPY = "Run a copy of the task, without its hooks (forge.snapshot.copies.without_hooks)."
CURES = {
    "numbers": "Draw from a generator of your own.",
    "process": "Restore it before user code runs.",
    "hook": COPY,
    "call": COPY,
    FILES: "Write below trainer.run_dir.",
}


class Sightings:
    """What the user's code has seen: marks of a record, each with the kind of what was seen."""

    def __init__(self) -> None:
        self.record = Record(keep=True)
        self.record.update = 0
        self._flags = read_flags()

    def __deepcopy__(self, memo: Any) -> Sightings:
        return Sightings()  # what the code of a copy sees is its own

    def add(self, kind: str, what: str) -> None:
        self.record.mark(kind, what)

    def look_at_process(self) -> None:
        """Add what the process shares and has changed since the beginning."""
        for name, value in changed_flags(self._flags):
            self.add("process", f"{name} is {getattr(value, '__qualname__', value)!r}")

    def hook(self, kind: str, what: str) -> Callable[..., None]:
        """Return a hook that writes here, also where a copy of its module has it."""

        def hook(*args: Any, **kwargs: Any) -> None:
            evaluates = kind == "hook" and isinstance(args[0], nn.Module) and not args[0].training
            self.add("evaluation" if evaluates else kind, what)

        return hook


def hooks_of(owner: type) -> dict[str, str]:
    """Return the hooks that one can register with a module or an optimizer, and the kind of what each sees."""
    names = [name.removeprefix("register_") for name in dir(owner) if re.fullmatch("register_.+_hook", name)]
    names = [name for name in names if name != "backward_hook"]  # full_backward_hook is it today
    return {name: "state_dict" if "state_dict" in name else "hook" for name in names}


class SpiedFunction(torch.autograd.Function):
    """Doubles a tensor, and sees it go forward and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Sightings) -> Tensor:
        ctx.seen = seen
        seen.add("call", "the forward of an autograd function")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.seen.add("call", "the backward of an autograd function")
        return grads[0] * 2, None


class SpyingOptimizer(torch.optim.SGD):
    seen: Sightings

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.add("call", "step of the optimizer")
        return super().step(*args, **kwargs)


class SpyingTask(TinyTask):
    """Has hooks of every kind, and generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = seen = Sightings()
        self.own_torch = torch.Generator().manual_seed(1)
        self.own_numpy, self.own_python = np.random.default_rng(1), random.Random(1)
        for path in ("", "net", "net.1", "net.4"):
            for name, kind in hooks_of(nn.Module).items():
                if path.startswith("net.") or "backward" not in name:  # gradients reach these alone
                    hook = seen.hook(kind, f"a {name} of {path or 'the task'}")
                    getattr(self.get_submodule(path), f"register_{name}")(hook)
        for name, parameter in self.named_parameters():
            parameter.register_hook(seen.hook("hook", f"a tensor hook of {name}"))
            parameter.register_post_accumulate_grad_hook(seen.hook("hook", f"a hook on the gradient of {name}"))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add("call" if self.training else "evaluation", "forward of the task")
        y = self.net(x)
        if y.requires_grad:
            y = SpiedFunction.apply(y, self.seen)
            y.register_hook(self.seen.hook("hook", "a tensor hook of the output"))
        return y

    def training_step(self, batch: Any) -> Any:
        self.seen.record.update = (self.seen.record.update or 0) + 1
        self.seen.add("call", "training_step")
        self.seen.look_at_process()
        drawn = (random.random(), np.random.rand(), torch.rand(()).item())
        own = (self.own_python.random(), self.own_numpy.random(), torch.rand((), generator=self.own_torch).item())
        self.seen.add("numbers", f"{drawn} from the global generators and {own} from the task's own")
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.seen.add("evaluation", "validation_step")
        return super().training_step(batch)

    def configure_optimizers(self) -> Any:
        optimizer = SpyingOptimizer(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.seen = self.seen
        for name, kind in hooks_of(torch.optim.Optimizer).items():
            getattr(optimizer, f"register_{name}")(self.seen.hook(kind, f"a {name} of the optimizer"))
        return optimizer


class SpyingData(Dataset[Any]):
    """Sees which samples are asked for."""

    def __init__(self, seen: Sightings, kind: str, seed: int):
        self.seen, self.kind = seen, kind
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.seen.add(self.kind, f"sample {index}")
        return self.inputs[index], self.labels[index]


def view(plugins: Iterable[Plugin]) -> Record:
    """Run a small fit with these plugins, and return what the user's code saw, and the files of the working directory:
    with their content, those of the run folder by name alone."""
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        here = Path(temporary)
        (here / "notes.txt").write_text("the user's")
        trainer = Trainer(
            plugins=list(plugins), seed=0, device="cpu", max_updates=UPDATES, log_every=2, run_dir=here / RUN
        )
        task = SpyingTask()
        train, val = (SpyingData(task.seen, kind, seed) for seed, kind in enumerate(("sample", "evaluation")))
        trainer.fit(task, DataLoader(train, BATCH, shuffle=True), DataLoader(val, BATCH))
        task.seen.look_at_process()
        for path in sorted(here.rglob("*")):
            if path.is_file():
                name = str(path.relative_to(here))
                content = b"" if name.startswith(RUN) else path.read_bytes()
                task.seen.record.mark(name, content, kind=FILES)
        return task.seen.record


def difference(bare: Record, seen: Record, effects: Iterable[str]) -> str:
    """Say what is seen first that the bare loop does not show, apart from these effects; "" if nothing is."""
    blind = {BLIND_TO[effect] for effect in effects if effect in BLIND_TO}
    may_write = "files" in effects
    ours, theirs = (
        each.where(lambda m: m.path not in blind and not (may_write and m.kind == FILES and m.path.startswith(RUN)))
        for each in (seen, bare)
    )
    found = first_difference(ours, theirs)
    return "" if found is None else f"{found}. {_cure(found)}"


def _cure(found: Difference) -> str:
    is_in_run = found.kind == FILES and found.path.startswith(RUN)
    effect = "files" if is_in_run else next((name for name, seen in BLIND_TO.items() if seen == found.path), "")
    return f"If that is its work, declare it: effects = ({effect!r},)." if effect else CURES[found.kind or found.path]


def check_purity(subject: Subject) -> None:
    """Compare what the user's code sees with and without an observer."""
    plugin = subject.make()
    effects = {effect for each in (plugin, *subject.beside()) for effect in each.effects}
    with subject.surviving("a fit of a task with hooks of every kind"):
        bare = view(subject.beside())
        loaded, seen = len(sys.modules), view([plugin, *subject.beside()])
        if len(sys.modules) > loaded:  # packages of others may change what the process shares when they are imported
            bare, seen = view(subject.beside()), view([subject.make(), *subject.beside()])
    found = difference(bare, seen, effects)
    assert not found, f"{subject.name!r} declares observer = True, but the user's code notices it: {found}"
