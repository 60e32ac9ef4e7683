"""Equivariance: permute the batch, change other samples, change what comes later: answers follow, or stay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.experiments.answers import Answers, answers, held_of
from forge_doctor.experiments.intervene import (
    Calls,
    apart,
    calls_of,
    draws,
    exchanged,
    named,
    numbers,
    parts,
    replaced,
)
from forge_doctor.experiments.reading import sides
from forge_doctor.experiments.regroup import SampleGroup, group_of
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient

NEAR = 1e-4
"""Differences of outputs that count as none, as a share of their deviation."""
MOST_STEPS = 512
MOST_AHEAD = 4
COUNTS, CROPPED = 0.05, 1e-2
"""The shares by which less padding changes a loss that counts it, and answers that it reaches."""


def samples(patient: Patient) -> Iterator[Finding]:
    """Change one half of a batch: what layers give for the other half must stay, in evaluation mode."""
    for stage, _ in patient.stages[::-1]:
        found = list(_mixed(patient, stage))
        yield from found
        if found:
            return


def _mixed(patient: Patient, stage: str) -> Iterator[Finding]:
    group = group_of(patient, stage)
    if group is None or group.size < 4:
        return  # a graph, or several lengths: rows are no samples
    size, batch = group.size, group.take(range(group.size))
    base = calls_of(patient, batch, stage, every=True)[0]
    if _differing(base, calls_of(patient, batch, stage, seed=SEED + 1, every=True)[0], size, slice(None)):
        return  # it draws random numbers, of which the rows get others
    if stage == "train" and patient.can_validate and _differs(_after_another(patient, stage, patient.batches)):
        return  # statistics over batches, as of a normalisation by hand; in validation, samples were apart
    mixed = list[list[tuple[str, float]]]()
    for half in (range(size // 2, size), range(size // 2)):
        other, kept = group.with_others(half)
        if kept is None:
            continue
        after = calls_of(patient, other, stage, every=True)[0]
        found = _differing(base, after, size, kept)
        mixed.append(found if _differing(base, after, size, kept, last=True) else [])  # some keep rows together
    if any(mixed) and not all(mixed) and not group.is_read:
        return  # only what comes later depends on what came before: rows may be steps of time
    found = _turned(patient, stage, batch, group, base)
    if found:
        path, worst = found[0]
        level = "" if stage == "train" or _turns_in_train(patient) else "note"  # a simulation may have its own noise
        text = (
            f"What {path} gives for a sample changes by {worst:.2g} of its deviation when the order of the samples in "
            "the batch is reversed, in evaluation mode: it depends on the sample's place in the batch."
        )
        yield Finding("batch_dependence", text, path, {"difference": worst}, level=level)
        return
    if any(mixed):
        path, worst = mixed[0][0]
        yield Finding(
            "batch_dependence",
            f"What {path} gives for one half of a batch changes by {worst:.2g} of its deviation when the other "
            f"half is replaced, in evaluation mode: samples are mixed in or before {path}.",
            path,
            {"difference": worst, "layers": [path for path, _ in mixed[0]][:8]},
        )


def _after_another(patient: Patient, stage: str, batches: list[Any]) -> list[dict[str, float]]:
    """What a step says in evaluation mode of a batch, and of the same batch after another one."""
    task, said = patient.clone().eval(), []
    with torch.no_grad(), suppress(Exception):
        for batch in (*batches[:2], batches[0]):
            said.append(numbers(patient.run(task, batch, stage)))
    return said[::2] if len(said) == 3 else []


def _differs(said: list[dict[str, float]]) -> str:
    return next((n for n in said[0] if apart(said[0][n], said[1].get(n, math.nan)) > 1e-4), "") if said else ""


def _fills_buffers(patient: Patient, batch: Any) -> bool:
    """Whether a training step in evaluation mode changes buffers of the task: what it keeps is saved."""
    task = patient.clone().eval()
    before = {path: b.clone() for path, b in task.named_buffers()}
    with torch.no_grad():
        patient.run(task, batch, "train")
    now = dict(task.named_buffers())
    return any(path not in now or not torch.equal(b.nan_to_num(), now[path].nan_to_num()) for path, b in before.items())


def _turns_in_train(patient: Patient) -> bool:
    group = group_of(patient, "train")
    if group is None or group.size < 4:
        return False
    batch = group.take(range(group.size))
    return bool(_turned(patient, "train", batch, group, calls_of(patient, batch, "train", every=True)[0]))


def _turned(patient: Patient, stage: str, batch: Any, group: SampleGroup, base: Calls) -> list[tuple[str, float]]:
    """The last layer, where its answers do not follow a batch in reverse order; noise of a fixed seed cannot."""
    back = group.turned()
    if back is not None and not draws(patient, stage, batch):
        with suppress(Exception):  # an order that the step refuses
            turned = calls_of(patient, back, stage, every=True)[0]
            return _differing(base, turned, group.size, slice(None), last=True, change=lambda x: x.flip(0))
    return []


def _differing(
    before: Calls,
    after: Calls,
    size: int,
    kept: slice | Tensor,
    last: bool = False,
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[tuple[str, float]]:
    """Layers whose rows of the kept samples differ, in the order of their calls."""
    found = []
    keys = [key for key in before if any(_views(x, size) for x in before[key])]
    for key in keys[-1:] if last else keys:
        for x, y in zip(before[key], after.get(key, []), strict=False):
            if x.shape != y.shape or x.ndim == 0 or torch.equal(x, y):
                continue  # what does not depend on the batch has no rows of samples
            scale = float(x.float().std(correction=0)) or 1.0
            views = [(a, b) for a, b in zip(_views(x, size), _views(y, size), strict=True)]
            if views:
                worst = min(float((a[kept].float() - change(b)[kept].float()).abs().max()) / scale for a, b in views)
                if worst > NEAR:
                    found.append((key[0] or "the task", worst))
    return found


def _views(x: Tensor, size: int) -> list[Tensor]:
    """An output with the sample as its first dimension; of several rows for each, as neighbours and as blocks."""
    if not x.ndim or not len(x) or (len(x) == size and x.ndim > 1 and x.shape[1] == size):
        return []  # of each with each, as for contrastive losses
    if len(x) == size:
        return [x]
    if len(x) < size or len(x) % size:
        return []
    each = len(x) // size
    return [x.reshape(size, each, *x.shape[1:]), x.reshape(each, size, *x.shape[1:]).transpose(0, 1)]


def answers_seen(patient: Patient) -> Iterator[Finding]:
    """Change what an answer is compared with: where it is another position of an input, the answer must stay."""
    batch = patient.batches[0]
    size, held = batch_size(batch), held_of(patient, batch)
    if held is None or size is None:
        return
    base = held.slopes()
    whole = {path: x for path, x in parts(batch).items() if x.ndim > 1 and len(x) == size and x.dtype != torch.bool}
    for path, x in whole.items():
        steps = x.shape[1]
        if not 4 <= steps <= MOST_STEPS:
            continue
        ahead = Counter[tuple[str, int]]()
        for t in (steps // 2, steps // 2 + 1):
            with suppress(Exception):
                asked = moved_steps(
                    base, held.slopes(batch=exchanged(batch, x, lambda x, t=t: rolled_at(x, t))), size, steps
                )
                for other, j in _copies(whole, x, t) if 0 < len(asked) <= 3 else ():
                    ahead[other, j - t] += 1
                    is_plain = other == path or (j > t and ahead[other, j - t] == 2)  # a shift, not another order
                    if j in asked or not is_plain:
                        continue
                    z = whole[other]
                    now = answers(patient, exchanged(batch, z, lambda z, j=j: rolled_at(z, j)))
                    if now is not None and asked <= moved_steps(held.values, now.values, size, z.shape[1]):
                        text = (
                            f"Step {j} of {named(other, patient)} is what the answer at step {min(asked)} is compared "
                            "with, and that answer changes with it: the model sees what it is to predict."
                        )
                        more, where, cure = _way_of(patient, held, z, j, min(asked))
                        evidence = {"step": j, "answer": min(asked)}
                        yield Finding("sees_the_future", text + more, where or held.paths[-1], evidence, cure)
                        return


def _way_of(patient: Patient, held: Answers, z: Tensor, j: int, asked: int) -> tuple[str, str, str]:
    """Whether an answer sees steps after its own, too, the first module in which it does, and the cure."""
    batch, size, steps = patient.batches[0], len(z), z.shape[1]
    now = answers(patient, exchanged(batch, z, lambda z: rolled_at(z, min(j + 2, steps - 1))))
    is_later = j + 2 < steps and now is not None and asked in moved_steps(held.values, now.values, size, steps)
    given = [batch, exchanged(batch, z, lambda z: rolled_at(z, j))]
    before, after = (calls_of(patient, x, "train", every=True)[0] for x in given)
    first = next(
        (
            path
            for (path, number), x in before.items()
            if path and any(t <= asked for t in moved_steps(x, after.get((path, number), x), size, steps))
        ),
        "",
    )
    seen = f" It shows first in what {first} returns." if first else ""
    if is_later:
        return f" It changes with later steps, too.{seen}", first, MIXED
    return f" It changes with no later step.{seen}", first, UNSHIFTED


MIXED = "Position t may see positions up to t: look at the mask there, and at a reshape where axes are to be exchanged."
UNSHIFTED = "It is off by one step: the diagonal of the mask, or the input, which is to be shifted against the targets."


def _is_copy(z: Tensor, x: Tensor) -> bool:
    """Whether a step is one of another tensor, but for a few samples that end there; a step of padding is no one's."""
    kinds, kind, counts = (
        x.flatten(1).unique(dim=0, return_inverse=True, return_counts=True)
        if x.ndim > 1
        else (x.unique(return_inverse=True, return_counts=True))
    )
    rare = kind != counts.argmax()
    same = (z == x).reshape(len(x), -1).all(1)
    return len(kinds) > 2 and int(rare.sum()) >= 4 and float(same[rare].float().mean()) > 0.8


def _copies(whole: dict[str, Tensor], x: Tensor, t: int) -> list[tuple[str, int]]:
    """Where a step of a tensor stands in a batch: in itself, and as a step of others."""
    own = [path for path, z in whole.items() if z is x]
    others = [
        (path, j)
        for path, z in whole.items()
        if z is not x and z.shape[2:] == x.shape[2:]
        for j in range(z.shape[1])
        if _is_copy(z[:, j], x[:, t])
    ]
    return [(own[0], t), *others]


def steps_ahead(patient: Patient) -> Iterator[Finding]:
    """How far ahead in the input stands what an answer is compared with, where that is a step of the input."""
    batch = patient.batches[0]
    size, held = batch_size(batch), held_of(patient, batch)
    if held is None or size is None or size < 4:
        return
    whole = {path: x for path, x in parts(batch).items() if x.ndim == 2 and len(x) == size and x.shape[1] >= 8}
    given = [x for x in sides(held)[0] if any(x is y for y in whole.values())]
    base, ahead = held.slopes(), set[int]()
    for x in whole.values():
        steps, is_given = x.shape[1], any(x is z for z in given)
        for t in (steps // 2, steps // 2 + 1):
            with suppress(Exception):
                change = exchanged(batch, x, lambda x, t=t: rolled_at(x, t))
                asked = moved_steps(base, held.slopes(batch=change), size, steps)
                where = {j for z in given for j in range(z.shape[1]) if torch.equal(z[:, j], x[:, t])}
                if len(asked) == 1 and where and not (is_given and max(where) == min(asked)):  # of itself, or a mask
                    ahead |= {max(where) - min(asked)}
    most = ahead.pop() if len(ahead) == 1 else 1
    if 1 < most <= MOST_AHEAD:
        text = (
            f"Each answer is compared with what stands {most} steps after it in the input: the next step is left out, "
            "as if targets were shifted more than once."
        )
        yield Finding("skips_a_step", text, patient.place(), {"steps": most})
    elif most == 0:
        text = "Each answer is compared with what stands at the same step of the input: the model can copy it."
        yield Finding("sees_the_future", text, patient.place(), {"steps": 0}, level="note")


def rolled_at(x: Tensor, t: int) -> Tensor:
    x[:, t] = x[:, t].roll(1, 0).clone()
    return x


def moved_steps(before: list[Tensor], after: list[Tensor], size: int, steps: int) -> set[int]:
    """The steps at which answers, or their gradients, differ."""
    found: set[int] = set()
    for x, y in zip(before, after, strict=True):
        if x.shape != y.shape:
            continue
        scale = float(x.abs().mean()) or 1.0
        off = (x - y).abs() > 1e-5 * scale
        for length in (steps, steps - 1):
            shaped = in_steps(off, size, length)
            if shaped is not None:
                found |= set(shaped.flatten(2).any(-1).any(0).nonzero().flatten().tolist())
                break
    return found


def in_steps(x: Tensor, size: int, steps: int) -> Tensor | None:
    """A tensor as (samples, steps, the rest); None where it has no such shape."""
    if x.ndim >= 2 and x.shape[:2] == (size, steps):
        return x.reshape(size, steps, -1)
    if x.ndim >= 1 and len(x) == size * steps:
        return x.reshape(size, steps, -1)
    if x.ndim >= 2 and x.shape[:2] == (steps, size):
        return x.transpose(0, 1).reshape(size, steps, -1)
    if x.ndim == 3 and len(x) == size and x.shape[2] == steps:
        return x.transpose(1, 2).reshape(size, steps, -1)
    return None


def state(patient: Patient) -> Iterator[Finding]:
    """Run another batch before one: what a step says of it must not depend on that, while the weights stay."""
    for stage, batches in patient.stages:
        said = _after_another(patient, stage, batches) if stage == "val" or len(patient.names) == 1 else []
        name = _differs(said)
        if name and not (stage == "train" and _fills_buffers(patient, batches[0])):  # which are kept on purpose
            text = (
                f"{name} of a batch of {stage} is {said[0][name]:.6g}, and {said[1][name]:.6g} after another batch, "
                "with the same weights: something is carried over."
            )
            yield Finding("state_between_batches", text, patient.place(stage), {"of": [s[name] for s in said]})


def cropped(patient: Patient) -> Iterator[Finding]:
    """Cut off the padding behind the longest of some shorter samples: what is said of them must stay."""
    batch = patient.batches[0]
    size = batch_size(batch)
    if size is None or size < 8 or len(patient.names) > 1:
        return
    for x in parts(batch).values():
        ends = _ends(x) if x.ndim and len(x) == size else None
        if ends is None:
            continue
        lengths, steps = (~ends).sum(1), x.shape[1]
        chosen = lengths.argsort()[: size // 2]
        longest = max(2, int(lengths[chosen].max()))
        if longest >= steps:
            continue
        rows = [y for y in parts(batch).values() if y.ndim and len(y) == size]
        wide = [y for y in rows if y.ndim > 1 and y.shape[1] == steps]
        whole = replaced(batch, {id(y): y[chosen] for y in rows})
        short = replaced(
            batch, {id(y): y[chosen][:, :longest] if any(y is z for z in wide) else y[chosen] for y in rows}
        )
        with suppress(Exception):  # a step that takes one length alone
            yield from _told_of_padding(patient, whole, short, ~ends[chosen][:, :longest])
        return


def _told_of_padding(patient: Patient, whole: Any, short: Any, own: Tensor) -> Iterator[Finding]:
    """Compare what the last layer and the loss say with all padding and with less; `own`: steps that are none."""
    (before, said), (after, now) = (calls_of(patient, batch, "train") for batch in (whole, short))
    again = calls_of(patient, whole, "train", seed=SEED + 1)[1]
    if not before or again != said:
        return
    last = [key for key in before if len(before[key]) == 1 and key in after and len(before[key][0]) == len(own)][-1:]
    for path, number in last:
        x, y = before[path, number][0], after[path, number][0]
        if x.ndim > 1 and x.shape[1] > own.shape[1] and y.shape[1] == own.shape[1]:
            x, y = x[:, : own.shape[1]][own], y[own]
        scale = float(x.float().std(correction=0)) or 1.0
        moved = float((x - y).abs().max()) / scale if x.shape == y.shape and x.numel() else 0.0
        if moved > CROPPED:
            text = (
                f"What {path or 'the task'} says of {len(own)} samples changes by {moved:.2g} of its deviation when "
                "the padding behind the longest of them is cut off: padding reaches the answers."
            )
            cure = "Mask padding wherever samples are summed up or attended to, and read states at a sample's own end."
            yield Finding("depends_on_company", text, path, {"difference": moved}, cure)
            return
    if apart(said.get("loss", math.nan), now.get("loss", math.nan)) > COUNTS:
        text = (
            f"The loss of {len(own)} samples is {said['loss']:.4g}, and {now['loss']:.4g} when the padding behind the "
            "longest of them is cut off: padded positions count."
        )
        yield Finding("padding_in_loss", text, patient.place(), {"loss": said["loss"], "cropped": now["loss"]})


def _ends(rows: Tensor) -> Tensor | None:
    """Where rows of whole numbers, or of vectors, end with one of them, in runs of different lengths; None if not."""
    is_text = rows.ndim == 2 and not rows.is_floating_point() and rows.dtype != torch.bool
    if not (is_text or (rows.ndim == 3 and rows.is_floating_point())) or rows.shape[1] < 4:
        return None
    flat = rows.reshape(*rows.shape[:2], -1)
    kinds, counts = flat[:, -1].unique(dim=0, return_counts=True)
    same = (flat == kinds[int(counts.argmax())]).all(2)
    ends = same.flip(1).long().cumprod(1).flip(1).bool()
    runs = ends.sum(1)
    several = int((runs > 1).sum()) >= 0.4 * len(rows) and len(runs.unique()) >= 3 and int(runs.min()) < rows.shape[1]
    return ends if several and int(same.sum() - runs.sum()) <= 0.05 * int(runs.sum()) else None
