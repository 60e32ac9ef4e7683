"""Matrix product in tiles, with an epilogue while a tile is in registers.

Tiles are read and written through tensor descriptors: on Hopper the copy engine (TMA) moves them, elsewhere Triton
turns them into plain loads and stores. The programs are persistent: as many as fit on the device, each computing one
tile after another, so that loading the next tile overlaps with the end of the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from forge_kernels.contract import device_of
from forge_kernels.triton.activations import activate
from forge_kernels.triton.rows import processors


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return row and column of a tile, GROUP rows at a time, so that concurrent tiles share data in the L2 cache."""
    band = tile // (GROUP * tiles_n)
    height = min(tiles_m - band * GROUP, GROUP)
    inside = tile % (GROUP * tiles_n)
    return band * GROUP + inside % height, inside // height


@triton.jit
def _finish(
    total, out, pre, bias, sums, row, column, tile_m, N, KIND: tl.constexpr, MODE: tl.constexpr, WIDTH: tl.constexpr
):
    """Compute the epilogue: see `product`."""
    columns = column + tl.arange(0, WIDTH)
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0).to(tl.float32)[None, :]
    if MODE == "slope":
        x = pre.load([row, column]).to(tl.float32)
        _, slope = activate(x, KIND)
        total *= slope
        tl.store(sums + tile_m.to(tl.int64) * N + columns, tl.sum(total, 0), mask=columns < N)
    else:
        if MODE == "keep":
            pre.store([row, column], total.to(pre.dtype))
        total, _ = activate(total, KIND)
    out.store([row, column], total.to(out.dtype))


@triton.jit
def _product(
    a, b, out, pre, bias, sums, M, N, K,
    TURN_A: tl.constexpr, TURN_B: tl.constexpr, KIND: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=AHEAD):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BM
        column = tile_n * BN
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            if TURN_A:
                left = a.load([k, row]).T
            else:
                left = a.load([row, k])
            if TURN_B:
                right = b.load([column, k]).T
            else:
                right = b.load([k, column])
            total = tl.dot(left, right, total, input_precision=PRECISION)
        if HALVES:  # half a tile at a time frees shared memory for one more stage of the loop, or one more program
            half: tl.constexpr = BN // 2
            first, second = tl.split(tl.permute(tl.reshape(total, (BM, 2, half)), (0, 2, 1)))
            _finish(first, out, pre, bias, sums, row, column, tile_m, N, KIND, MODE, half)
            _finish(second, out, pre, bias, sums, row, column + half, tile_m, N, KIND, MODE, half)
        else:
            _finish(total, out, pre, bias, sums, row, column, tile_m, N, KIND, MODE, BN)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes and launch options of a tile."""

    rows: int
    columns: int
    depth: int
    "How much of the inner dimension is multiplied at a time."
    halves: bool
    "Whether a tile is finished one half after the other."
    warps: int
    stages: int
    "How many steps of the inner dimension are on their way at a time."
    programs: int
    "How many programs have room on one multiprocessor."
    ahead: bool = True
    "Whether the next tile is loaded while one is finished. It takes shared memory."
    registers: int | None = None
    "The most that a thread may take, so that so many programs have room."


# Measured on an H200, see benchmarks/LOG.md. One large tile per multiprocessor is fastest for the product itself; with
# two smaller ones the second is multiplied during the first one's epilogue, which pays for long epilogues.
_PLAIN = Tiling(128, 256, 64, True, 8, 4, 1)
_KEEP = Tiling(128, 128, 64, True, 4, 3, 2)
_SLOPE = Tiling(128, 128, 64, True, 8, 3, 2, ahead=False, registers=128)
_FEW_TILES = Tiling(64, 128, 64, False, 4, 3, 2)
_SMALL_MEMORY = Tiling(128, 128, 32, True, 8, 3, 1)
_FLOAT32 = Tiling(64, 64, 16, False, 4, 3, 2)
_TF32 = Tiling(128, 128, 16, True, 8, 3, 1)


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the device is Hopper; the interpreter counts as one."""
    return device.type != "cuda" or torch.cuda.get_device_properties(device).major == 9


def _tiling(M: int, N: int, dtype: torch.dtype, mode: str, precision: str, device: torch.device) -> Tiling:
    if dtype is torch.float32:
        return _FLOAT32 if precision == "ieee" else _TF32
    if not _is_hopper(device):
        return _SMALL_MEMORY
    if _parts(M, 128) * _parts(N, 128) < 2 * processors(device):
        return _FEW_TILES
    return {"value": _PLAIN, "keep": _KEEP, "slope": _SLOPE}[mode]


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, kind: str, mode: str = "value", pre: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a @ b of matrices, with an epilogue.

    Mode value: (activation(a @ b + bias), None, None). Mode keep: the same with a @ b + bias as the second. Mode slope,
    given `pre`: (a @ b · activation'(pre), None, its column sums in float32).
    """
    (M, K), N, device = a.shape, b.shape[1], a.device
    if M == 0 or N == 0:
        out = a.new_empty(M, N)
        return out, out.clone() if mode == "keep" else None, a.new_zeros(N, dtype=torch.float32)
    if K == 0:
        a, b, K = a.new_zeros(M, 16), b.new_zeros(16, N), 16
    precision = "tf32" if a.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    t = _tiling(M, N, a.dtype, mode, precision, device)
    out = _room(M, N, a)
    kept = _room(M, N, a) if mode == "keep" else None if pre is None else _readable(pre, turn=False)[0]
    sums = a.new_empty(_parts(M, t.rows), N, dtype=torch.float32) if mode == "slope" else None
    bias = None if bias is None else bias.contiguous()
    a, turn_a = _readable(a)
    b, turn_b = _readable(b)
    width = t.columns // 2 if t.halves else t.columns
    tiles = _parts(M, t.rows) * _parts(N, t.columns)
    with device_of(a):
        _product[(min(tiles, t.programs * processors(device)),)](
            _descriptor(a, t.depth, t.rows) if turn_a else _descriptor(a, t.rows, t.depth),
            _descriptor(b, t.columns, t.depth) if turn_b else _descriptor(b, t.depth, t.columns),
            _descriptor(out, t.rows, width),
            None if kept is None else _descriptor(kept, t.rows, width),
            bias, sums, M, N, K, turn_a, turn_b, kind, mode, precision,
            t.rows, t.columns, t.depth, 8, t.halves, t.ahead,
            num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers,
        )  # fmt: skip
    kept = kept.contiguous() if kept is not None and mode == "keep" else None
    return out.contiguous(), kept, None if sums is None else sums.sum(0)


def _parts(whole: int, size: int) -> int:
    """Return how many parts of this size cover a length."""
    return -(-whole // size)


def _readable(x: Tensor, turn: bool = True) -> tuple[Tensor, bool]:
    """Return x or, with `turn`, its transpose, whichever has contiguous rows aligned to 16 bytes, else a copy; and
    whether it is the transpose."""
    unit = 16 // x.itemsize
    rows, columns = x.shape
    down, right = x.stride()
    if x.data_ptr() % 16 == 0:
        if right == 1 and down % unit == 0 and down >= columns > 0:
            return x, False
        if turn and down == 1 and right % unit == 0 and right >= rows > 0:
            return x.t(), True
    wide = x.new_zeros(rows, max(1, _parts(columns, unit)) * unit)
    wide[:, :columns] = x
    return wide, False


def _room(rows: int, columns: int, like: Tensor) -> Tensor:
    unit = 16 // like.itemsize
    room = like.new_empty(rows, _parts(columns, unit) * unit)
    return room if columns % unit == 0 else room[:, :columns]


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Make a descriptor without its constructor's checks, which would take most of the time here: `_readable` and
    `_room` guarantee them."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, x.shape, x.stride(), [rows, columns]
    made.padding = "zero"
    return made
