"""LSTM, GRU and RNN as loops that torch.export can trace at any length; torch's own are unrolled at the example's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from forge_ship.engine import ExportError
from forge_ship.interface import replaced
from forge_ship.torch_internals import while_loop

States = tuple[Tensor, ...]
Cell = Callable[[Tensor, States], States]
"""Computes the next states of a layer from a step's input, already multiplied by its weights, and the states."""


def has_recurrence(model: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


@contextmanager
def looped(model: nn.Module) -> Iterator[None]:
    """Have a model's recurrent layers compute step by step in a loop of torch's, for a while."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                stack.enter_context(replaced(module, "forward", partial(forward, module)))
        yield


def forward(rnn: nn.RNNBase, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
    """Return what the layer returns, in eval mode."""
    if isinstance(input, PackedSequence) or getattr(rnn, "proj_size", 0):
        what = "a PackedSequence" if isinstance(input, PackedSequence) else "proj_size"
        raise ExportError(f"{type(rnn).__name__} with {what} cannot be exported at any length: give --dynamic batch.")
    batched = input.dim() == 3
    steps = input if batched else input.unsqueeze(1)
    steps = steps.transpose(0, 1) if rnn.batch_first and batched else steps
    directions, kinds = 1 + rnn.bidirectional, 2 if rnn.mode == "LSTM" else 1
    given = None if hx is None else ((hx,) if kinds == 1 else tuple(hx))
    if given is not None and not batched:
        given = tuple(state.unsqueeze(1) for state in given)
    last: list[States] = []
    for layer in range(rnn.num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            zero = steps.new_zeros(steps.shape[1], rnn.hidden_size)
            states = tuple(zero.clone() for _ in range(kinds)) if given is None else tuple(s[number] for s in given)
            suffix = f"l{layer}{'_reverse' if direction else ''}"
            output, states = _one_direction(rnn, suffix, steps.flip(0) if direction else steps, states)
            outputs.append(output.flip(0) if direction else output)
            last.append(states)
        steps = torch.cat(outputs, 2) if directions > 1 else outputs[0]
    final = tuple(torch.stack(each) for each in zip(*last, strict=True))
    output = steps.transpose(0, 1) if rnn.batch_first and batched else steps
    if not batched:
        output, final = output.squeeze(1), tuple(state.squeeze(1) for state in final)
    return output, final if kinds == 2 else final[0]


def _one_direction(rnn: nn.RNNBase, suffix: str, steps: Tensor, states: States) -> tuple[Tensor, States]:
    inside, hidden = getattr(rnn, f"weight_ih_{suffix}"), getattr(rnn, f"weight_hh_{suffix}")
    biases = [getattr(rnn, f"bias_{kind}_{suffix}") if rnn.bias else None for kind in ("ih", "hh")]
    gates = nn.functional.linear(steps, inside, biases[0])
    cell = partial(CELLS[rnn.mode], hidden, biases[1])

    def is_open(at: Tensor, output: Tensor, gates: Tensor, *states: Tensor) -> Tensor:
        return at < gates.shape[0]

    def step(at: Tensor, output: Tensor, gates: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        now = torch.index_select(gates, 0, at.reshape(1)).squeeze(0)
        after = cell(now, states)
        written = torch.index_copy(output, 0, at.reshape(1), after[0].unsqueeze(0))
        return at + 1, written, gates.clone(), *after

    begin = torch.zeros((), dtype=torch.int64, device=steps.device)
    output = gates.new_zeros(gates.shape[0], gates.shape[1], rnn.hidden_size)
    _, output, _, *after = while_loop(is_open, step, (begin, output, gates, *(s.clone() for s in states)))
    return output, tuple(after)


def _lstm(weight: Tensor, bias: Tensor | None, now: Tensor, states: States) -> States:
    hidden, cell = states
    i, f, g, o = (now + nn.functional.linear(hidden, weight, bias)).chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(weight: Tensor, bias: Tensor | None, now: Tensor, states: States) -> States:
    ours, theirs = now.chunk(3, 1), nn.functional.linear(states[0], weight, bias).chunk(3, 1)
    reset, update = (ours[0] + theirs[0]).sigmoid(), (ours[1] + theirs[1]).sigmoid()
    new = (ours[2] + reset * theirs[2]).tanh()
    return (new + update * (states[0] - new),)


def _plain(act: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor | None, now: Tensor, states: States) -> States:
    return (act(now + nn.functional.linear(states[0], weight, bias)),)


CELLS: dict[str, Callable[..., States]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": partial(_plain, torch.tanh),
    "RNN_RELU": partial(_plain, torch.relu),
}
