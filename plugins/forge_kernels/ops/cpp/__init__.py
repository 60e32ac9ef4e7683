"""Operators written in C++: :mod:`.finite` is the pattern, and :mod:`.build` compiles them at their first use."""

from __future__ import annotations

from forge_kernels.ops.cpp.finite import ALL_FINITE, all_finite

__all__ = ["ALL_FINITE", "all_finite"]
