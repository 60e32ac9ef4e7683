"""The operators themselves, in Triton: one file for each module of :mod:`forge.kernels`. Imported only where Triton is
installed."""
