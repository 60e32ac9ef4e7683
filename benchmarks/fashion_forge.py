"""The lab of fashion_plain.py with forge: the unchanged recipe `fashion_mlp`, as in `forge fit fashion_mlp`.

python -m benchmarks.fashion_forge --data FOLDER --run-dir FOLDER
"""

from __future__ import annotations

import argparse
import time

import torch

import forge
from forge_recipes.fashion_mlp import FashionMLP
from forge_recipes.fashion_mnist import fashion_mnist


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fashion_forge")
    parser.add_argument("--data", default="data")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fused", action="store_true", help="Adam in one kernel")
    parser.add_argument("--run-dir")
    options = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(options.seed)  # initial weights

    recipe = forge.recipe("fashion_mlp", [f"trainer.seed={options.seed}", f"trainer.max_epochs={options.epochs}"])
    trainer = forge.Trainer(recipe=recipe, run_dir=options.run_dir, device="cpu")
    data = fashion_mnist(root=options.data)
    result = trainer.fit(FashionMLP(fused=options.fused), data.train, data.val)

    print(f"seconds {time.perf_counter() - start:.2f}  test accuracy {result.metrics['val/accuracy']:.4f}")


if __name__ == "__main__":
    main()
