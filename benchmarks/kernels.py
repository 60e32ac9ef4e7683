"""Every kernel on its cases: time, share of the roofline and peak memory, against eager and torch.compile.

    python -m benchmarks.kernels                                  # all kernels, minutes on a GPU
    python -m benchmarks.kernels layer_norm softmax
    python -m benchmarks.kernels --json > kernels.jsonl           # one JSON object per line: the machine, then the rows
    python -m benchmarks.kernels --tiny                           # smoke test on any machine

Forward and backward together, medians of Triton's do_bench with cold caches and random data. The roofline is the
larger of operations over a product's rate and bytes over a copy's, both measured at the start. Bytes are those of the
least passes over the tensors: a backward that needs the forward's input or result reads it again.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from benchmarks import machine
from forge_kernels import discovery
from forge_kernels.contract import Kernel
from forge_kernels.testing import outputs_of

Work = Callable[[], None]

DTYPE = torch.bfloat16
HALF = 2
"""Bytes of an entry."""
SHAPES = ((16384, 768), (16384, 2048), (16384, 4096), (8192, 8192))


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device()) * scale).to(DTYPE).requires_grad_()


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments for one kernel, and their least work."""

    kernel: str
    name: str
    make: Callable[[], tuple[Any, ...]]
    flops: float
    bytes: float
    options: dict[str, Any] = field(default_factory=dict)


def rows_case(kernel: str, passes: int, vectors: int, rows: int, columns: int) -> Case:
    def make() -> tuple[Tensor, ...]:
        return normal(rows, columns), *(normal(columns) for _ in range(vectors))

    return Case(kernel, f"{rows}×{columns}", make, 0, passes * rows * columns * HALF)


def loss_case(rows: int, classes: int) -> Case:
    def make() -> tuple[Tensor, ...]:
        return normal(rows, classes), torch.randint(classes, (rows,), device=device())

    return Case("cross_entropy", f"{rows}×{classes}", make, 0, 2 * rows * classes * HALF)


def head_case(tokens: int, width: int, classes: int) -> Case:
    def make() -> tuple[Tensor, ...]:
        target = torch.randint(classes, (tokens,), device=device())
        return normal(tokens, width), normal(classes, width, scale=width**-0.5), target

    size = 2 * (tokens + classes) * width * HALF
    return Case("linear_cross_entropy", f"T{tokens} D{width} V{classes}", make, 6 * tokens * width * classes, size)


def product_case(rows: int, depth: int, columns: int) -> Case:
    def make() -> tuple[Tensor, ...]:
        return normal(rows, depth), normal(depth, columns)

    entries = 2 * rows * columns + 3 * rows * depth + 3 * depth * columns
    return Case("matmul", f"{rows}×{depth}×{columns}", make, 6 * rows * depth * columns, entries * HALF)


def mlp_case(rows: int, width: int, hidden: int) -> Case:
    def make() -> tuple[Tensor, ...]:
        first, second = normal(hidden, width, scale=width**-0.5), normal(width, hidden, scale=hidden**-0.5)
        return normal(rows, width), first, normal(hidden), second, normal(width)

    entries = 5 * rows * width + 2 * rows * hidden + 6 * width * hidden
    return Case("mlp", f"{width}→{hidden}→{width}, T={rows}", make, 12 * rows * width * hidden, entries * HALF)


def attention_case(batch: int, heads: int, length: int, size: int) -> Case:
    def make() -> tuple[Tensor, ...]:
        return tuple(normal(batch, length, heads, size).detach().transpose(1, 2).requires_grad_() for _ in range(3))

    flops, entries = 7 * batch * heads * length**2 * size, 12 * batch * heads * length * size
    return Case("attention", f"B{batch} H{heads} S{length} D{size}", make, flops, entries * HALF, {"causal": True})


CASES = [
    *(rows_case("rms_norm", 5, 1, *shape) for shape in SHAPES),
    *(rows_case("layer_norm", 5, 2, *shape) for shape in SHAPES),
    *(rows_case("softmax", 5, 0, *shape) for shape in ((16384, 4096), (8192, 32768))),
    *(loss_case(8192, classes) for classes in (50304, 128256)),
    head_case(8192, 4096, 128256),
    head_case(65536, 768, 50304),
    product_case(4096, 4096, 4096),
    product_case(8192, 8192, 8192),
    attention_case(16, 12, 1024, 64),
    attention_case(64, 12, 1024, 64),
    attention_case(4, 32, 4096, 128),
    mlp_case(16384, 768, 3072),
    mlp_case(65536, 768, 3072),
    mlp_case(8192, 4096, 16384),
]
TINY = [rows_case("softmax", 5, 0, 4, 8), loss_case(4, 8), mlp_case(4, 8, 8)]
TORCHS_OWN: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5),
    "rms_norm": lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6),
    "softmax": partial(F.softmax, dim=-1),
}
"""Where the reference is not torch's own function: it computes in a wider dtype."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One contender on one case."""

    kernel: str
    case: str
    contender: str
    ms: float | None = None
    share: float | None = None
    "Of the roofline."
    peak_mb: float | None = None
    "Peak memory of one pass, without its inputs."
    note: str = ""


def measure(case: Case) -> Iterator[KernelRow]:
    torch.manual_seed(1234)
    kernel, args = discovery.load(case.kernel), case.make()
    for name, function in contenders(kernel).items():
        try:
            work = forward_and_backward(function, args, case.options)
            peak, seconds = peak_of(work), seconds_of(work)
        except Exception as error:  # one failing contender must not stop the others
            yield KernelRow(case.kernel, case.name, name, note=f"{type(error).__name__}: {str(error)[:100]}")
        else:
            flops_per_s, bytes_per_s = limits()
            share = max(case.flops / flops_per_s, case.bytes / bytes_per_s) / seconds
            yield KernelRow(case.kernel, case.name, name, round(seconds * 1e3, 4), round(share, 4), peak)
        gc.collect()
        torch.cuda.empty_cache()


def forward_and_backward(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Work:
    """Return what runs a function forward, and backward for the arguments that require a gradient. A scalar gets the
    gradient 1, as from `loss.backward()`: a kernel may have computed that already."""
    wanted = [tensor for tensor in args if tensor.requires_grad]
    given = [
        torch.ones_like(output) if output.dim() == 0 else torch.randn_like(output)
        for output in outputs_of(function, args, options)
    ]

    def once() -> None:
        torch.autograd.grad(outputs_of(function, args, options), wanted, given)

    return once


@cache
def limits() -> tuple[float, float]:
    """Measure operations and bytes per second: a large product, and a large copy, which reads and writes each byte."""
    count, side = (2**30, 8192) if torch.cuda.is_available() else (2**22, 128)
    source = torch.zeros(count, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    a, b = normal(side, side).detach(), normal(side, side).detach()
    multiplied, copied = seconds_of(lambda: a @ b), seconds_of(lambda: target.copy_(source))
    return 2 * side**3 / multiplied, 2 * count / copied


def seconds_of(work: Callable[[], object]) -> float:
    """Return the median of what a function takes; on CUDA the device's time with cold caches."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        milliseconds: Any = do_bench(work, return_mode="median")
        return milliseconds / 1e3
    return Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=0.05).median


def contenders(kernel: Kernel) -> dict[str, Callable[..., Any]]:
    torch.compiler.reset()  # else another case's shape would count as a recompile
    compiled = torch.compile(kernel.reference, dynamic=False)
    return {"forge": kernel.function, "eager": TORCHS_OWN.get(kernel.name, kernel.reference), "compile": compiled}


def peak_of(work: Work) -> float | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)


def table(rows: list[KernelRow]) -> Table:
    shown = Table()
    for heading in ("kernel", "case", "", "ms", "roofline", "peak MB", ""):
        shown.add_column(heading, justify="right" if heading in ("ms", "roofline", "peak MB") else "left")
    for row in rows:
        share = "-" if row.share is None else f"{row.share:.1%}"
        numbers = [str(value) if value is not None else "-" for value in (row.ms, share, row.peak_mb)]
        shown.add_row(row.kernel, row.case, row.contender, *numbers, row.note)
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "kernels", nargs="*", choices=[[], *sorted({case.kernel for case in CASES})], help="default: all"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--tiny", action="store_true", help="small cases, to see that it runs")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.tiny:
        print("No CUDA device is available. For a smoke test: --tiny", file=sys.stderr)
        return 2
    flops_per_s, bytes_per_s = limits()
    described = {"host": machine.describe(), "flops_per_s": flops_per_s, "bytes_per_s": bytes_per_s}
    print(json.dumps(described) if options.json else machine.sentence(), flush=True)
    rows = []
    for case in TINY if options.tiny else CASES:
        if options.kernels and case.kernel not in options.kernels:
            continue
        for row in measure(case):
            rows.append(row)
            if options.json:
                print(json.dumps(asdict(row)), flush=True)
    if not options.json:
        print(f"{flops_per_s / bytes_per_s:.0f} FLOP/byte: kernels with fewer are memory-bound")
        print(f"{bytes_per_s / 1e12:.2f} TB/s copied, {flops_per_s / 1e12:.0f} TFLOP/s in bfloat16, measured now")
        Console(width=None if sys.stdout.isatty() else 140).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
