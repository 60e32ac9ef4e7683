"""Contenders: functions that train a case from start to end. The first is the hand-written loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.cases import Batches, Case, loss_of

Train = Callable[[Case, Batches, Path], nn.Module]
"""Train the case on all batches, write only below the given folder, return the trained network."""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    train: Train
    note: str
    "Its enabled features, and how it gets batches."
    environ: Mapping[str, str] = field(default_factory=dict)
    "Environment variables that its import set; restored during its runs only."


def bare(case: Case, batches: Batches, folder: Path) -> nn.Module:
    """Train with a hand-written loop, with accumulation, clipping and schedule only if the case has them."""
    network = case.build()
    optimizer = case.optimizer(network)
    if case.accumulate == 1 and case.clip is None and not case.scheduled:
        for batch in batches:
            loss_of(network, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return network
    schedule, micro, max_norm = case.schedule(optimizer), case.accumulate, case.clip
    for index, batch in enumerate(batches, 1):
        (loss_of(network, batch) / micro).backward()
        if index % micro == 0:
            if max_norm is not None:
                clip_grad_norm_(network.parameters(), max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return network


BARE = [
    Contender("bare", bare, "hand-written loop"),
    Contender("bare again", bare, "the same again: the difference is noise"),
]
