"""Write docs/plugins/: a page for each built-in plugin, made from its docstrings, and an overview of them.

    python docs/make_pages.py

tests/docs/test_plugins.py fails when a page is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from forge import registry
from forge.cli import plugin_page

FOLDER = Path(__file__).parent / "plugins"
GROUPS = {
    "Speed and memory": {
        "amp": "mixed precision (bf16, fp16)",
        "compile": "torch.compile",
        "cuda_graph": "CUDA graphs",
        "kernels": "fused kernels",
        "fp8": "linear layers in float8",
        "remat": "activation checkpointing",
        "prefetch": "copying batches to the GPU ahead of use",
        "fused_optimizer": "fused optimizer steps",
        "channels_last": "memory format of images",
        "backends": "TF32, cuDNN benchmark, attention backends",
    },
    "Distributed training": {
        "ddp": "data parallel training (DDP)",
        "zero": "divided optimizer state (ZeRO-1 and 2)",
        "fsdp": "sharded training (FSDP2)",
        "pipeline": "pipeline parallelism",
        "tensor_parallel": "tensor parallelism",
        "torchft": "replicas that survive each other (torchft)",
        "context_parallel": "context parallelism (long sequences)",
        "expert_parallel": "expert parallelism (mixtures of experts)",
    },
    "Training": {
        "accumulate": "gradient accumulation",
        "clip": "gradient clipping",
        "schedule": "learning rate schedules",
        "ema": "exponential moving average of weights",
        "swa": "stochastic weight averaging",
        "sam": "sharpness-aware minimisation",
        "freeze": "freezing and gradual unfreezing",
        "qat": "quantisation-aware training (int8)",
        "early_stop": "early stopping",
        "duration": "time limits and minimum lengths",
        "limit": "fewer batches, overfitting a few",
        "validate_first": "a validation before training",
    },
    "Checkpoints and safety": {
        "checkpoint": "checkpointing",
        "rehearse": "proof that a run can be resumed",
        "guard": "NaN and infinity guard",
        "anomaly": "finding the source of a NaN",
        "first_look": "mistakes in the first updates",
    },
    "Logging and profiling": {
        "progress": "progress bar",
        "jsonl": "metrics as JSON lines",
        "csv": "metrics as a table",
        "tensorboard": "TensorBoard logging",
        "wandb": "Weights & Biases logging",
        "mlflow": "MLflow logging",
        "monitor": "gradient, weight and activation statistics",
        "spans": "where the time goes, rates, MFU, cost of each plugin",
        "system": "GPU, CPU, memory and disk",
        "profiler": "profiling",
    },
}
"""The titles of the pages, in the order of the overview; a test checks that no plugin is missing."""
LABELS = r"^(When to use it|What you see|Together with):"
"""Labels at the start of a docstring's paragraph; the page prints them bold."""
INTRODUCTION = """\
Add a plugin with one line in a recipe, or with `-p NAME` on the command line. forge checks every combination of plugins
before a run starts: it either works, or is refused with a message that names the conflict. `forge plugins NAME` prints
the same text as these pages. [Plugin costs and speedups](../levers.md) has measurements, and the
[hooks reference](../hooks.md#hooks-by-plugin) lists the hooks that each plugin uses."""


def pages() -> dict[str, str]:
    """Return every page by file name."""
    entries = registry.installed("plugin")
    lines = ["# Plugins", "", INTRODUCTION, ""]
    made: dict[str, str] = {}
    for group, titles in GROUPS.items():
        lines += [f"## {group}", "", "| plugin | technique | what it does |", "|---|---|---|"]
        for name, title in titles.items():
            lines.append(f"| [{name}]({name}.md) | {title} | {registry.summary(entries[name])} |")
            page = plugin_page.markdown(name, title=f"{name}: {title}")
            made[f"{name}.md"] = re.sub(LABELS, r"**\1:**", page, flags=re.MULTILINE)
        lines.append("")
    return {"README.md": "\n".join(lines), **made}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
