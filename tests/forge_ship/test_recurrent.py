"""Recurrent layers as loops compute what torch's layers compute, at any length."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from forge_ship.engine import ExportError
from forge_ship.recurrent import looped
from tests.support.profiles import some

KINDS = [nn.LSTM, nn.GRU, nn.RNN]
SHAPES = list(itertools.product([1, 2], [False, True], [False, True], [True, False]))


def close(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return all(close(a, b) for a, b in zip(found, expected, strict=True))
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kind", some(KINDS))
@pytest.mark.parametrize(("layers", "both", "first", "bias"), some([SHAPES[13], SHAPES[3], *SHAPES[::2]]))
def test_a_loop_is_the_layer(kind: Any, layers: int, both: bool, first: bool, bias: bool) -> None:
    rnn = kind(3, 5, num_layers=layers, bidirectional=both, batch_first=first, bias=bias).eval()
    states = torch.randn(layers * (1 + both), 2, 5)
    given = (states, torch.randn_like(states)) if kind is nn.LSTM else states
    inputs = torch.randn(2, 4, 3) if first else torch.randn(4, 2, 3)
    with torch.no_grad():
        for arguments in ((inputs,), (inputs, given)):
            expected = rnn(*arguments)
            with looped(rnn):
                assert close(rnn(*arguments), expected)
            assert close(rnn(*arguments), expected)


def test_a_packed_sequence_is_refused() -> None:
    rnn = nn.GRU(3, 5).eval()
    packed = nn.utils.rnn.pack_sequence([torch.randn(2, 3)])
    with looped(rnn), pytest.raises(ExportError, match="PackedSequence"):
        rnn(packed)
