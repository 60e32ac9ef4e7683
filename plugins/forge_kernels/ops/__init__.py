"""The operators: what users call, their references in plain torch, their contracts. `forge.kernels` has the names."""
