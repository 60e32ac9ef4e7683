"""Probes of order: whether a forecast sees what it forecasts, and whether positions and their order are read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forge.data.accumulation_windows import batch_size
from forge.torch_internals import pytree
from forge_doctor.findings import Finding
from forge_doctor.free_output import changed
from forge_doctor.patient import Patient, tensors
from forge_doctor.probes.independence import again, difference, networks, shifted
from forge_doctor.probes.losses import padding_value
from forge_doctor.watch import OuterCall

FEW = 4
"""Positions that a row must have."""
MOST = 48
"""Positions that are tried one by one."""
MOST_WORDS = 256
"""Different tokens that are counted."""


def forecast(patient: Patient) -> Iterator[Finding]:
    """Where targets are the numbers of a series moved by one step, an output must not change with later numbers."""
    batch = patient.batches[0]
    place, dim = _series(patient)
    if place is None:
        return
    steps = tensors(batch)[place].shape[dim]
    cut = steps // 2
    later = changed(batch, place, lambda x: _other_end(x, cut, dim))
    before, after = _last_output(patient, batch, steps), _last_output(patient, later, steps)
    if before is None or after is None or before[1].shape != after[1].shape:
        return
    path, x, along = before
    worst = difference(x.narrow(along, 0, cut), after[1].narrow(along, 0, cut))
    if worst > 1e-3:
        yield Finding(
            "sees_the_future",
            f"The targets are the inputs moved by one step, but outputs before step {cut} change (by {worst:.2g} of "
            "their deviation) when later inputs do: the model sees what it predicts.",
            path or type(patient.task).__name__,
            {"difference": worst},
            cure="Pad convolutions on the left alone, mask attention, and read recurrent layers in one direction.",
        )


def _series(patient: Patient) -> tuple[int | None, int]:
    """The place and the dimension of time of a series whose next numbers are the target of a loss."""
    given = tensors(patient.batches[0])
    for place, x in enumerate(given):
        if not x.is_floating_point() or x.ndim not in (2, 3):
            continue
        for dim in range(1, x.ndim):
            if x.shape[dim] < 6:
                continue
            following = x.narrow(dim, 1, x.shape[dim] - 1)
            for y in (call.target for call in patient.watched.losses):
                if not isinstance(y, Tensor) or not y.is_floating_point():
                    continue
                whole = y.shape == following.shape and torch.equal(y, following)
                paired = y.shape == x.shape and torch.equal(y.narrow(dim, 0, y.shape[dim] - 1), following)
                if whole or paired:
                    return place, dim
    return None, 1


def _other_end(x: Tensor, cut: int, dim: int) -> Tensor:
    start, end = x.narrow(dim, 0, cut), x.narrow(dim, cut, x.shape[dim] - cut)
    return torch.cat([start, end.roll(1, 0)], dim)


def _last_output(patient: Patient, batch: Any, steps: int) -> tuple[str, Tensor, int] | None:
    """The last output of a module that has a number for each step, and its dimension of time."""
    task = patient.clone().eval()
    for call in reversed(patient.outer_calls(task, batch)):
        for x in tensors(call.output):
            dims = [d for d in range(1, x.ndim) if x.shape[d] in (steps, steps - 1)]
            if (
                x.is_floating_point()
                and len(dims) == 1
                and any(True for _ in task.get_submodule(call.path).parameters())
            ):
                return call.path, x, dims[0]
    return None


def previous(patient: Patient) -> Iterator[Finding]:
    """Where labels are the inputs moved by one position, each output must depend on the token just before its own."""
    batch = patient.batches[0]
    targets = [call.target for call in patient.watched.losses if isinstance(call.target, Tensor)]
    inputs = shifted(batch, targets)
    if inputs is None or not FEW <= inputs.shape[1] <= MOST:
        return
    task = patient.clone().eval()
    for call in reversed(patient.outer_calls(task, batch)):
        ids = [
            x for x in tensors((call.args, call.kwargs)) if _is_ids(x, len(inputs)) and x.shape[1] == inputs.shape[1]
        ]
        if len(ids) != 1 or not torch.equal(ids[0], inputs):
            continue
        deaf = _deaf(task, call, ids[0])
        if deaf and len(deaf) < 0.6 * (ids[0].shape[1] - 1):
            yield Finding(
                "positions_ignored",
                f"The labels are the inputs moved by one position, but the outputs at positions {_listed(deaf)} do not "
                "depend on the token before theirs; those at other positions do.",
                call.path or type(task).__name__,
                {"positions": deaf[:16]},
                cure="Split heads by view(batch, steps, heads, width).transpose(1, 2), and look at the mask.",
            )
        return


def _deaf(task: nn.Module, call: OuterCall, ids: Tensor) -> list[int]:
    """Positions whose output stays when the token before them is another."""
    before = next((x for x in again(task, call, call.args, call.kwargs) if x.ndim == 3), None)
    if before is None or before.shape[1] != ids.shape[1]:
        return []
    deaf = []
    for t in range(1, ids.shape[1]):
        after = next(x for x in again(task, call, *_with(call, ids, _rolled_at(ids, t - 1))) if x.ndim == 3)
        if torch.equal(before[:, t], after[:, t]) and not torch.equal(before[:, t - 1], after[:, t - 1]):
            deaf.append(t)
    return deaf


def _listed(positions: list[int]) -> str:
    return ", ".join(map(str, positions[:5])) + (", ..." if len(positions) > 5 else "")


def _is_ids(x: Tensor, size: int | None) -> bool:
    """Whether a tensor holds a row of ids for each sample; positions, which are alike in all rows, are none."""
    plain = x.ndim == 2 and len(x) == size and not x.is_floating_point() and x.dtype != torch.bool
    return plain and x.shape[1] >= FEW and bool((x != x[:1]).any()) and len(x.unique()) > 2


def _with(call: OuterCall, old: Tensor, new: Tensor) -> Any:
    return pytree.tree_map(lambda x: new if x is old else x, (call.args, call.kwargs))


def _rolled_at(x: Tensor, t: int) -> Tensor:
    """Rows exchange what they hold at one position."""
    other = x.clone()
    other[:, t] = x[:, t].roll(1, 0)
    return other


def positions(patient: Patient) -> Iterator[Finding]:
    """A result for a whole row that depends on one of its positions alone."""
    batch = patient.val_batches[0] if patient.can_validate else patient.batches[0]
    size = batch_size(batch)
    task = patient.clone().eval()
    for call in networks(patient, task, batch):
        given = [x for x in tensors((call.args, call.kwargs)) if x.ndim]
        rows = [x for x in given if _is_ids(x, size) or (x.ndim == 3 and len(x) == size and x.is_floating_point())]
        if len(rows) != 1 or not FEW <= rows[0].shape[1] <= MOST:
            continue
        before = again(task, call, call.args, call.kwargs)
        if any(rows[0].shape[1] in x.shape[1:] for x in before if x.ndim > 1 and x.is_floating_point()):
            continue
        read = [t for t in range(rows[0].shape[1]) if _matters(task, call, rows[0], t, before)]
        varied = sum(bool((rows[0][:, t] != rows[0][:1, t]).any()) for t in range(rows[0].shape[1]))
        if len(read) == 1 and varied >= FEW:
            yield Finding(
                "positions_ignored",
                f"The output of {call.path or type(task).__name__} depends on position {read[0]} of "
                f"{rows[0].shape[1]} alone: the others can be exchanged and nothing changes.",
                call.path or type(task).__name__,
                {"position": read[0], "positions": rows[0].shape[1]},
                cure="Read the last step of a recurrent layer, h[:, -1], or the mean over all steps.",
            )
            return


def _matters(task: nn.Module, call: OuterCall, rows: Tensor, t: int, before: list[Tensor]) -> bool:
    after = again(task, call, *_with(call, rows, _rolled_at(rows, t)))
    return any(x.shape != y.shape or not torch.equal(x, y) for x, y in zip(before, after, strict=True))


class AttentionWatch(TorchFunctionMode):
    """Notes whether positions attend to each other."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), [x for x in args if isinstance(x, Tensor)]
        if name == "scaled_dot_product_attention" and len(given) > 1:
            self.seen |= given[0].shape[-2] == given[1].shape[-2] == self.steps
        elif name in ("multi_head_attention_forward", "_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
            self.seen = True
        elif "softmax" in name and given:
            self.seen |= given[0].ndim > 2 and given[0].shape[-2:] == (self.steps, self.steps)
        return func(*args, **(kwargs or {}))


def permuted(patient: Patient) -> Iterator[Finding]:
    """Tokens that attend to each other in no order: a permutation of them must change the result."""
    batch = patient.val_batches[0] if patient.can_validate else patient.batches[0]
    size = batch_size(batch)
    task = patient.clone().eval()
    for call in networks(patient, task, batch):
        wide = [x for x in tensors((call.args, call.kwargs)) if x.ndim == 2 and len(x) == size]
        ids = [x for x in wide if _is_ids(x, size)]
        if len(ids) != 1 or any(x.shape == ids[0].shape and not bool((x != x[:1]).any()) for x in wide):
            continue
        if _repeats(ids[0]) < 0.3:  # a set has each of its items once
            continue
        steps = ids[0].shape[1]
        watch = AttentionWatch(steps)
        with watch:
            before = again(task, call, call.args, call.kwargs)
        if not watch.seen:
            continue
        order = torch.randperm(steps, generator=torch.Generator().manual_seed(1)).to(ids[0].device)
        move = lambda x, order=order, ids=ids: x[:, order] if _is_like(x, ids[0]) else x  # noqa: E731
        after = again(task, call, *pytree.tree_map(move, (call.args, call.kwargs)))
        pairs = [(x, y) for x, y in zip(before, after, strict=True) if x.is_floating_point() and x.ndim > 1]
        if pairs and all(_is_alike(x, y, order) for x, y in pairs):
            gain = _gain_of_order(patient, ids[0], batch)
            yield Finding(
                "order_ignored",
                f"The outputs of {call.path or type(task).__name__} are the same for any order of its {steps} tokens: "
                f"attention has no positions{gain[0]}.",
                call.path or type(task).__name__,
                {"tokens": steps},
                level="warning" if gain[1] > 0.15 else "note",
            )
            return


def _gain_of_order(patient: Patient, ids: Tensor, batch: Any) -> tuple[str, float]:
    """By how much places of words tell the label better than their counts do, in a linear fit, and how to say so."""
    rows = [x for x in tensors(batch) if x.ndim and len(x) == len(ids)]
    place = next((i for i, x in enumerate(rows) if x.shape == ids.shape and torch.equal(x, ids)), None)
    labels = patient.labels
    if labels is None or place is None or len(labels) < 200 or int(ids.max()) >= MOST_WORDS:
        return "", 0.0
    words = torch.stack([sample[place] for sample in patient.samples]).cpu().clamp(0, MOST_WORDS - 1)
    counts = F.one_hot(words, MOST_WORDS).float()
    when = torch.linspace(-1, 1, words.shape[1])[:, None]
    bag = _accuracy(counts.sum(1), labels)
    ordered = _accuracy(torch.cat([counts.sum(1), (counts * when).sum(1)], 1), labels)
    said = (
        f"; a linear fit to counts of tokens is right in {bag:.0%} of the samples, one to their places in {ordered:.0%}"
    )
    return said, ordered - bag


def _accuracy(features: Tensor, labels: Tensor) -> float:
    """How often a linear fit to the first 70 % of the samples is right on the others."""
    x = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    y = F.one_hot(labels, int(labels.max()) + 1).double()
    cut = int(0.7 * len(x))
    weights = torch.linalg.solve(x[:cut].T @ x[:cut] + torch.eye(x.shape[1]).double(), x[:cut].T @ y[:cut])
    return float(((x[cut:] @ weights).argmax(1) == labels[cut:]).double().mean())


def _repeats(ids: Tensor) -> float:
    """The share of rows in which an id, other than the most frequent one, stands twice."""
    padding = ids.mode().values.mode().values
    rows = [row[row != padding] for row in ids]
    return sum(len(row.unique()) < len(row) for row in rows) / len(rows)


def _is_like(x: Any, ids: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == ids.shape


def _is_alike(x: Tensor, y: Tensor, order: Tensor) -> bool:
    """Whether two outputs are the same, or the same in another order."""
    if x.ndim > 2 and x.shape[1] == len(order):
        x = x[:, order]
    return x.shape == y.shape and difference(x, y) < 1e-4


def padding_mask(patient: Patient) -> Iterator[Finding]:
    """Masks of attention that mark the tokens instead of the padding."""
    ids = [x for x in tensors(patient.batches[0]) if not x.is_floating_point() and x.ndim == 2]
    padded = [(x, value) for x in ids if x.dtype != torch.bool and (value := padding_value(x)) is not None]
    if not padded:
        return
    seen: list[tuple[str, Tensor]] = []
    task = patient.clone()
    for path, module in task.named_modules():
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)):
            module.register_forward_pre_hook(functools.partial(_note_mask, seen, path), with_kwargs=True)
    with torch.no_grad():
        patient.again(task)
    for path, mask in seen:
        for x, value in padded:
            real = x != value
            if mask.shape == x.shape and torch.equal(mask, real):
                yield Finding(
                    "mask_inverted",
                    f"The padding mask of {path} is True at all tokens and False at the padding: attention sees the "
                    "padding alone.",
                    path,
                )
                return


def _note_mask(seen: list[tuple[str, Tensor]], path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    mask = kwargs.get("src_key_padding_mask", kwargs.get("key_padding_mask"))
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        seen.append((path, mask))
