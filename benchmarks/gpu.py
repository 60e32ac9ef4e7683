"""Milliseconds per update on a GPU: a hand-written loop, forge, Lightning and accelerate, each in its own process.

    python -m benchmarks.gpu                                   # everything; about 8 minutes on an H200
    python -m benchmarks.gpu --cases mlp,resnet18              # limited by the host
    python -m benchmarks.gpu --cases gpt2 --rows bare,forge    # some rows
    python -m benchmarks.gpu --json > gpu.jsonl                # one JSON object per line: the machine, then the rows
    python -m benchmarks.gpu --tiny                            # smoke test on any machine, a minute

Every row trains the same network (the recipes' own) with the same optimizer from the same batches in pinned host
memory. The clock runs between two synchronisations, in five blocks, after a warm-up for compilation, allocation and
capture: the figure is the median block, the spread half the distance between the extremes. The first row runs again at
the end, to show drift. "loss" is the mean of the losses logged in the last block, or the last loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.command_line import some_of

LOG_EVERY = 50
PEAK = 989e12
"""Dense bf16 operations per second of an H200, from its data sheet; MFU is a share of it."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    what: str
    build: Callable[..., Any]
    "Makes the task, tiny or not."
    batch: Callable[[bool, torch.Generator], tuple[Tensor, Tensor]]
    bf16: bool
    clip: float | None
    updates: int
    warm_up: int
    tokens: int = 0
    "Tokens per update, for language models."


def _mlp(tiny: bool, **options: Any) -> Any:
    from forge_recipes.mlp import MLP

    return MLP(hidden=32 if tiny else 512)


def _vectors(tiny: bool, make: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(128, 784, generator=make), torch.randint(10, (128,), generator=make)


def _resnet(tiny: bool, **options: Any) -> Any:
    from forge_recipes.resnet import ResNet18

    return ResNet18()


def _images(tiny: bool, make: torch.Generator) -> tuple[Tensor, Tensor]:
    size = 2 if tiny else 128
    return torch.randn(size, 3, 32, 32, generator=make), torch.randint(10, (size,), generator=make)


def _gpt(tiny: bool, **options: Any) -> Any:
    from forge_recipes.gpt import GPT

    sizes = {"layers": 1, "width": 32, "heads": 2, "context": 16, "vocabulary": 100} if tiny else {}
    return GPT(**sizes, **options)


def _tokens(tiny: bool, make: torch.Generator) -> tuple[Tensor, Tensor]:
    batch, length, vocabulary = (2, 16, 100) if tiny else (64, 1024, 50257)
    text = torch.randint(vocabulary, (batch, length + 1), generator=make)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


CASES = {
    "mlp": Case("mlp", "MLP 784-512-512-10, batch 128, float32", _mlp, _vectors, False, None, 2000, 300),
    "resnet18": Case("resnet18", "ResNet-18 32×32, batch 128, bf16", _resnet, _images, True, None, 400, 60),
    "gpt2": Case("gpt2", "GPT-2 124M, T=1024, batch 64, bf16, clip", _gpt, _tokens, True, 1.0, 40, 12, 65536),
}
ROWS = {
    "bare": "hand-written loop; GPT-2 compiled",
    "bare compiled": "hand-written loop, torch.compile",
    "bare bf16 cudnn": "the same with a bf16 residual stream and cuDNN's attention, without forge",
    "bare reduce-overhead": "hand-written loop, torch.compile(mode='reduce-overhead')",
    "forge": "recipe default: jsonl and tensorboard every 50 updates, guard, checkpoint; GPT-2 compiled",
    "forge off": "only the plugins that the case needs; GPT-2 compiled",
    "forge cuda_graph": "jsonl and tensorboard every 50 updates, cuda_graph",
    "forge cuda_graph compiled": "jsonl and tensorboard every 50 updates, compile, cuda_graph",
    "forge kernels": "forge's loss and MLP, cuDNN's attention; jsonl and tensorboard",
    "forge kernels attention": "the same with forge's attention",
    "forge kernels bf16": "the same with cuDNN's attention and a bf16 residual stream, as in the recipe gpt2_124m",
    "lightning off": "barebones=True; GPT-2 compiled",
    "lightning default": "progress bar, logger, checkpoint, self.log",
    "accelerate": "the user's loop under Accelerator; GPT-2 compiled",
    "bare again": "the first row again: the difference is drift",
}
SMALL = [name for name in ROWS if "kernels" not in name and "bf16" not in name]
LARGE = ["bare", "bare bf16 cudnn", "forge off", "forge", "forge cuda_graph compiled", "forge kernels"]
LARGE += ["forge kernels attention", "forge kernels bf16"]
LARGE += ["lightning off", "lightning default", "accelerate", "bare again"]
OF_CASE = {"mlp": SMALL, "resnet18": SMALL, "gpt2": LARGE}


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    row: str
    ms_per_update: float | None
    ms_spread: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_gb: float | None
    loss: float | None
    note: str = ""


class Batches:
    """A loader that times blocks of updates; it has a length, which the peers require."""

    BLOCKS = 5

    def __init__(self, case: Case, tiny: bool):
        self.block = max(1, (10 if tiny else case.updates) // self.BLOCKS)
        self.warm_up = 6 if tiny else case.warm_up
        make = torch.Generator().manual_seed(1)
        made = [case.batch(tiny, make) for _ in range(4 if tiny else 16)]
        self.kept = [tuple(t.pin_memory() if torch.cuda.is_available() else t for t in batch) for batch in made]
        self.times: list[float] = []

    def __len__(self) -> int:
        return self.warm_up + self.BLOCKS * self.block + 1

    def __iter__(self) -> Iterator[Any]:
        stamps = range(self.warm_up, len(self), self.block)
        for index in range(len(self)):
            if index in stamps:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self.times.append(time.perf_counter())
            yield self.kept[index % len(self.kept)]

    @property
    def seconds(self) -> list[float]:
        return sorted((b - a) / self.block for a, b in zip(self.times, self.times[1:], strict=False))


Train = Callable[[Case, Batches, bool, Path], float]
"""Train a case to its end, and return its last loss."""


# ---------------------------------------------------------------------------------------------------------------------
# The contenders


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def bare(mode: str | None, **options: Any) -> Train:
    def train(case: Case, batches: Batches, tiny: bool, folder: Path) -> float:
        torch.manual_seed(0)
        task = case.build(tiny, **options).to(device()).train()
        compiled = mode or ("default" if case.name == "gpt2" else None)
        step = torch.compile(task.training_step, mode=compiled) if compiled else task.training_step
        optimizers = named(task.configure_optimizers())
        loss = torch.zeros(())
        for batch in batches:
            inputs = tuple(t.to(device(), non_blocking=True) for t in batch)
            for names in optimizers:
                with only(optimizers, names):
                    with torch.autocast(device(), torch.bfloat16, enabled=case.bf16):
                        output = step(inputs, *names)
                        loss = output["loss"] if isinstance(output, dict) else output
                    loss.backward()
                if case.clip:
                    nn.utils.clip_grad_norm_(task.parameters(), case.clip)
                optimizers[names].step()
                optimizers[names].zero_grad()
        return float(loss)

    return train


Optimizers = dict[tuple[str, ...], torch.optim.Optimizer]
"""By the arguments that a training step takes besides a batch: none, or with several optimizers the name of one."""


def named(optimizers: Any) -> Optimizers:
    return {(name,): each for name, each in optimizers.items()} if isinstance(optimizers, dict) else {(): optimizers}


@contextlib.contextmanager
def only(optimizers: Optimizers, names: tuple[str, ...]) -> Iterator[None]:
    """Compute gradients of one optimizer's parameters only, as forge and Lightning do."""
    others = [p for other in optimizers if other != names for g in optimizers[other].param_groups for p in g["params"]]
    for parameter in others:
        parameter.requires_grad_(False)
    yield
    for parameter in others:
        parameter.requires_grad_()


def ours(logs: bool = True, default: bool = False, compiled: bool = False, task: Any = None, **plugins: Any) -> Train:
    def train(case: Case, batches: Batches, tiny: bool, folder: Path) -> float:
        import forge

        stack: dict[str, Any] = {"jsonl": {}, "tensorboard": {}} if logs else {}
        if case.bf16:
            stack["amp"] = {"dtype": "bf16"}
        if case.clip:
            stack["clip"] = {"max_norm": case.clip}
        if compiled or case.name == "gpt2":
            stack["compile"] = {}
        torch.manual_seed(0)
        made = case.build(tiny, **(task or {}))
        options: dict[str, Any] = {"recipe": "default"} if default else {}
        trainer = forge.Trainer(
            max_epochs=1,
            seed=0,
            device=device(),
            log_every=LOG_EVERY,
            allow_inexact=True,  # this loader cannot be resumed
            run_dir=folder if logs or default else False,
            plugins={**stack, **plugins},
            **options,
        )
        metrics = trainer.fit(made, batches).metrics
        last = next(reversed(named(made.configure_optimizers())))
        return metrics["/".join(("train", *last, "loss"))]

    return train


def lightning(logs: bool) -> Train:
    def train(case: Case, batches: Batches, tiny: bool, folder: Path) -> float:
        import lightning.pytorch as pl

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.task = case.build(tiny)
                self.step = torch.compile(self.task.training_step) if case.name == "gpt2" else self.task.training_step
                self.last = torch.zeros(())
                self.automatic_optimization = len(named(self.task.configure_optimizers())) == 1
                self.made: Optimizers = {}

            def training_step(self, batch: Any) -> Tensor | None:
                if self.automatic_optimization:
                    return self.loss(batch)
                for names, optimizer in zip(self.made, self.optimizers(), strict=True):  # pyright: ignore
                    self.toggle_optimizer(optimizer)
                    self.manual_backward(self.loss(batch, *names))
                    optimizer.step()
                    optimizer.zero_grad()
                    self.untoggle_optimizer(optimizer)
                return None

            def loss(self, batch: Any, *names: str) -> Tensor:
                output = self.step(batch, *names)
                loss = output["loss"] if isinstance(output, dict) else output
                if logs:
                    self.log("_".join(("loss", *names)), loss, prog_bar=True)
                self.last = loss.detach()
                return loss

            def configure_optimizers(self) -> Any:
                self.made = named(self.task.configure_optimizers())  # now that parameters are on the device
                return list(self.made.values())

            def configure_gradient_clipping(
                self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
            ) -> None:
                if (
                    gradient_clip_val is not None
                ):  # Lightning's clipping refuses a fused AdamW in mixed precision, also bf16
                    nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

        torch.manual_seed(0)
        module = Module()
        options: dict[str, Any] = {"default_root_dir": folder} if logs else {"barebones": True}
        if case.clip:
            options["gradient_clip_val"] = case.clip
        precision = "bf16-mixed" if case.bf16 else "32-true"
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
        trainer = pl.Trainer(max_epochs=1, accelerator=accelerator, devices=1, precision=precision, **options)
        trainer.fit(module, batches)
        return float(module.last)

    return train


def accelerated(case: Case, batches: Batches, tiny: bool, folder: Path) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16" if case.bf16 else "no", cpu=not torch.cuda.is_available())
    torch.manual_seed(0)

    class Shell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.task = case.build(tiny)

        def forward(self, batch: Any, *names: str) -> Any:
            output = self.task.training_step(batch, *names)
            return output["loss"] if isinstance(output, dict) else output

    shell = Shell().to(device())
    made = named(shell.task.configure_optimizers())
    model, *prepared = accelerator.prepare(torch.compile(shell) if case.name == "gpt2" else shell, *made.values())
    optimizers = dict(zip(made, prepared, strict=True))
    loss = torch.zeros(())
    for batch in batches:
        inputs = tuple(t.to(device(), non_blocking=True) for t in batch)
        for names in optimizers:
            with only(optimizers, names):
                loss = model(inputs, *names)
                accelerator.backward(loss)
            if case.clip:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizers[names].step()
            optimizers[names].zero_grad()
    return float(loss)


FUSED: dict[str, Any] = {"attention": "cudnn", "loss": "chunked", "mlp": "fused"}
CONTENDERS: dict[str, Train] = {
    "bare": bare(None),
    "bare compiled": bare("default"),
    "bare bf16 cudnn": bare(None, residual="bf16", attention="cudnn"),
    "bare reduce-overhead": bare("reduce-overhead"),
    "bare again": bare(None),
    "forge": ours(default=True),
    "forge off": ours(logs=False),
    "forge cuda_graph": ours(cuda_graph={}),
    "forge cuda_graph compiled": ours(compiled=True, cuda_graph={}),
    "forge kernels": ours(task=FUSED),
    "forge kernels attention": ours(task={**FUSED, "attention": "forge"}),
    "forge kernels bf16": ours(task={**FUSED, "residual": "bf16"}),
    "lightning off": lightning(False),
    "lightning default": lightning(True),
    "accelerate": accelerated,
}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def measure(case: Case, row: str, tiny: bool) -> Row:
    """Measure one row in this process, with cuDNN's benchmark mode."""
    torch.backends.cudnn.benchmark = True
    batches = Batches(case, tiny)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        loss = CONTENDERS[row](case, batches, tiny, Path(folder) / "run")
    seconds = batches.seconds
    middle = seconds[len(seconds) // 2]
    rate = case.tokens / middle if case.tokens and not tiny else None
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return Row(
        case.name,
        row,
        round(1e3 * middle, 4),
        round(1e3 * (seconds[-1] - seconds[0]) / 2, 4),
        None if rate is None else round(rate),
        None if rate is None or not on_h200() else round(rate * flops_per_token() / PEAK, 4),
        None if peak is None else round(peak, 2),
        round(loss, 4),
    )


def on_h200() -> bool:
    """Whether the peak is that of this device."""
    return torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()


def flops_per_token() -> float:
    """Count GPT-2 124M at T=1024 as usual: 6 per parameter without positions, 12 per layer, width and position."""
    return 6 * (50304 * 768 + 12 * 12 * 768 * 768) + 12 * 12 * 768 * 1024


def in_its_own_process(case: str, row: str, tiny: bool) -> Row:
    command = [sys.executable, "-m", "benchmarks.gpu", "--one", case, row, *(["--tiny"] if tiny else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return Row(case, row, None, None, None, None, None, None, "not done after 10 minutes")
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Row(case, row, None, None, None, None, None, None, message[:300])
    return Row(**json.loads(last[0]))


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.one:
        print(json.dumps(asdict(measure(CASES[options.one[0]], options.one[1], options.tiny))))
        return 0
    if not torch.cuda.is_available() and not options.tiny:
        print("No CUDA device is available. For a smoke test: python -m benchmarks.gpu --tiny", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"machine": describe()}), flush=True)
    rows: list[Row] = []
    for case in options.cases:
        for row in [row for row in OF_CASE[case] if row in options.rows]:
            rows.append(in_its_own_process(case, row, options.tiny))
            if options.json:
                print(json.dumps(asdict(rows[-1])), flush=True)
            else:
                print(f"{case} {row}: {rows[-1].ms_per_update} ms {rows[-1].note}", file=sys.stderr, flush=True)
    if not options.json:
        print(f"{describe()['gpu']}; {machine.sentence()}")
        Console(width=None if sys.stdout.isatty() else 140).print(table(rows))
    return 0


def describe() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = {name: machine.version(name) for name in ("triton", "lightning", "accelerate")}
    return {"gpu": gpu, **machine.describe(), **{k: v for k, v in versions.items() if v}}


def table(rows: list[Row]) -> Table:
    shown = Table()
    shown.add_column("case", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for heading in ("ms/update", "±", "speed", "tokens/s", "MFU", "peak GB", "loss"):
        shown.add_column(heading, justify="right")
    shown.add_column("", overflow="fold")
    for row in rows:
        base = next((r.ms_per_update for r in rows if r.case == row.case and r.row == "bare"), None)
        ms = row.ms_per_update
        shown.add_row(
            row.case,
            row.row,
            "" if ms is None else f"{ms:.3f}",
            "" if row.ms_spread is None else f"{row.ms_spread:.3f}",
            f"{base / ms:.3f}×" if base and ms else "",
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            "" if row.mfu is None else f"{100 * row.mfu:.1f} %",
            "" if row.peak_gb is None else f"{row.peak_gb:.2f}",
            "" if row.loss is None else f"{row.loss:.3f}",
            row.note or ROWS[row.row],
        )
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--cases", type=some_of(CASES), default=list(CASES), help="names with commas between")
    parser.add_argument("--rows", type=some_of(ROWS), default=list(ROWS), help="names with commas between")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, to see that it runs")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "ROW"), help="one row in this process, as JSON")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TERM", "xterm-256color")
    sys.exit(main())
