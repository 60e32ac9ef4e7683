"""Every kernel on its cases: time, share of the roofline, error and memory, against eager and torch.compile.

    python -m benchmarks.kernels                                  # all kernels, about 10 minutes
    python -m benchmarks.kernels layer_norm softmax --against compile
    python -m benchmarks.kernels --json > kernels.jsonl           # one JSON object per line: the machine, then the rows

This is `forge kernels bench` with a line about the machine: forward and backward together, medians over passes with
cold caches and random data, device times only. The roofline is the larger of operations over a bfloat16 product's rate
and bytes over a copy's, both measured at the start. The error is the largest of all outputs and gradients, against the
reference in float64. The exit code is 1 if a kernel's error is above its tolerance.
"""

from __future__ import annotations

import json
import sys

from benchmarks import machine
from forge import cli


def main() -> int:
    words = sys.argv[1:]
    print(json.dumps({"host": machine.describe()}) if "--json" in words else machine.sentence(), flush=True)
    return cli.main(["kernels", "bench", *words])


if __name__ == "__main__":
    sys.exit(main())
