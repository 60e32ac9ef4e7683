"""What forge's own kernels are held to: that of :mod:`forge_kernels.testing`, and a little more.

Without a CUDA device kernels run in Triton's interpreter (conftest sets TRITON_INTERPRET), so keep shapes small there.
"""

from __future__ import annotations

import torch
from hypothesis import settings

from forge_kernels.contract import INTERPRETED
from forge_kernels.testing import (
    check_against_reference,
    check_compiles_whole,
    distance,
    in_float64,
    mend_interpreter,
    poisoned_memory,
    run,
)
from tests.conftest import PROFILE

__all__ = [
    "DEVICE",
    "check_against_reference",
    "check_compiles_whole",
    "distance",
    "few",
    "in_float64",
    "poisoned_memory",
    "run",
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
few = settings(max_examples=2 if PROFILE == "quick" else 250 if INTERPRETED else 500)
"""For tests that launch kernels for every example: the interpreter takes a tenth of a second."""


if INTERPRETED:
    mend_interpreter()
