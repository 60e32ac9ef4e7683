"""Operators written in Triton, one file or more for each module of :mod:`forge_kernels.ops`. Imported only if Triton is
installed."""
