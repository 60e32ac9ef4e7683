"""LightningModules of other packages, unchanged, under Lightning's Trainer and under forge: are the weights equal in
every bit? `python -m benchmarks.lightning_modules [NAME ...]`; see `__main__`."""
