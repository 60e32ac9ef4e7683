"""Pipelines, event by event: every forward and backward of every stage, in the order of a schedule.

`closed_form` is the formula of the literature for equal stages; `simulate` needs none: it runs the events, with stages
that differ, messages that take time, and noise.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
"""As torch.distributed.pipelining names them."""
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")


class Action(NamedTuple):
    """One piece of work of a rank."""

    kind: str
    "F: forward. B: backward, or only its gradient of the input if the schedule splits it. W: gradient of the weights."
    stage: int
    micro: int


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """A simulated update."""

    seconds: float
    busy: list[float]
    "Seconds of work, by rank."
    held: list[int]
    "The most micro-batches times chunks whose activations a rank holds at once."

    @property
    def bubble(self) -> float:
        """Return the share of time that the busiest rank waits."""
        return 1 - max(self.busy) / self.seconds


def closed_form(schedule: str, ranks: int, micros: int, forward: float, backward: float, chunks: int = 1) -> float:
    """Return the seconds of an update whose micro-batch takes `forward` and `backward` on each of equal ranks.

    GPipe and 1F1B wait for p - 1 micro-batches, interleaved stages for that divided by the chunks (Narayanan et al.,
    2021). A zero-bubble schedule fills with the gradients of the weights, half of a backward: what is left is
    (p - 1)(F + B - W)/chunks (Qi et al., 2023, ZB-H1).
    """
    work = micros * (forward + backward)
    if schedule in ("GPipe", "1F1B"):
        return work + (ranks - 1) * (forward + backward)
    if schedule == "Interleaved1F1B":
        return work + (ranks - 1) * (forward + backward) / chunks
    return work + (ranks - 1) * forward / chunks


def orders(schedule: str, ranks: int, micros: int, chunks: int = 1) -> list[list[Action]]:
    """Return what each rank does, in order; stage s is on rank s modulo ranks."""
    if schedule == "GPipe":
        return [
            [Action("F", r, i) for i in range(micros)] + [Action("B", r, i) for i in range(micros)]
            for r in range(ranks)
        ]
    if schedule == "1F1B":
        return [_one_forward_one_backward(r, ranks, micros, 1, ranks - r - 1) for r in range(ranks)]
    if micros % ranks:
        raise ValueError(f"{schedule} needs a multiple of {ranks} micro-batches, not {micros}.")
    return [
        _one_forward_one_backward(r, ranks, micros, chunks, 2 * (ranks - r - 1) + (chunks - 1) * ranks)
        for r in range(ranks)
    ]


def _one_forward_one_backward(rank: int, ranks: int, micros: int, chunks: int, ahead: int) -> list[Action]:
    """Return `ahead` forwards, then forwards and backwards in turn, then the backwards that are left."""
    total = micros * chunks
    ahead = min(ahead, total)

    def place(k: int) -> tuple[int, int]:
        rounds, within = divmod(k, ranks * chunks) if chunks > 1 else (0, 0)
        return (within // ranks, rounds * ranks + within % ranks) if chunks > 1 else (0, k)

    def forward(k: int) -> Action:
        chunk, micro = place(k)
        return Action("F", chunk * ranks + rank, micro)

    def backward(k: int) -> Action:
        chunk, micro = place(k)
        return Action("B", (chunks - 1 - chunk) * ranks + rank, micro)

    found = [forward(k) for k in range(ahead)]
    for k in range(total - ahead):
        found += [forward(ahead + k), backward(k)]
    return found + [backward(k) for k in range(total - ahead, total)]


Seconds = Callable[[Action], float]


def simulate(
    schedule: str, ranks: int, micros: int, seconds: Seconds, send: float = 0.0, chunks: int = 1
) -> PipelineRun:
    """Run an update event by event; `seconds` gives the time of an action, `send` that of a message between ranks."""
    splits = schedule == "InterleavedZeroBubble"
    queues = orders(schedule, ranks, micros, chunks)
    last = ranks * chunks - 1
    at, filling = [0] * ranks, [list[Action]() for _ in range(ranks)]
    idle, busy, holds, held = [True] * ranks, [0.0] * ranks, [0] * ranks, [0] * ranks
    arrived: set[Action] = {Action("F", 0, i) for i in range(micros)}
    events: list[tuple[float, int, str, int, Action]] = []
    now, number = 0.0, 0

    def push(when: float, what: str, rank: int, action: Action) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (when, number, what, rank, action))

    def start(rank: int) -> None:
        if not idle[rank]:
            return
        queue = queues[rank]
        action = queue[at[rank]] if at[rank] < len(queue) else None
        if action is not None and action in arrived:
            at[rank] += 1
        elif filling[rank]:
            action = filling[rank].pop(0)
        else:
            return
        taken = seconds(action)
        idle[rank] = False
        busy[rank] += taken
        if action.kind == "F":
            holds[rank] += 1
            held[rank] = max(held[rank], holds[rank])
        push(now + taken, "done", rank, action)

    def follow(action: Action, rank: int) -> None:
        """Tell who waits for this action."""
        kind, stage, micro = action
        if kind == "F":
            after = Action("F", stage + 1, micro) if stage < last else Action("B", stage, micro)
        elif kind == "B" and stage > 0:
            after = Action("B", stage - 1, micro)
        else:
            return
        to = after.stage % ranks
        push(now + (send if to != rank else 0.0), "arrived", to, after)

    for rank in range(ranks):
        start(rank)
    while events:
        now, _, what, rank, action = heapq.heappop(events)
        if what == "arrived":
            arrived.add(action)
        else:
            idle[rank] = True
            if action.kind == "B" and splits:
                filling[rank].append(Action("W", action.stage, action.micro))
            elif action.kind != "F":
                holds[rank] -= 1
            follow(action, rank)
        while events and events[0][0] == now and events[0][2] == "arrived":  # before anything fills the gap
            _, _, _, other, message = heapq.heappop(events)
            arrived.add(message)
            start(other)
        start(rank)
    assert all(at[r] == len(queues[r]) and not filling[r] for r in range(ranks)), "the schedule never ends"
    return PipelineRun(now, busy, held)
