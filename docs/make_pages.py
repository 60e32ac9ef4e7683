"""Write docs/plugins/: a page for each of forge's own plugins, made from its docstrings, and a list of them.

    python docs/make_pages.py

tests/docs/test_plugins.py says so when a page is not what its plugin says any more.
"""

from __future__ import annotations

from pathlib import Path

from forge import registry
from forge.cli import plugin_page

FOLDER = Path(__file__).parent / "plugins"
GROUPS = {
    "Speed and memory": ["amp", "compile", "cuda_graph", "kernels", "remat", "prefetch"],
    "Many processes": ["ddp", "fsdp", "tensor_parallel"],
    "Training": ["accumulate", "clip", "schedule", "ema", "swa", "sam", "freeze", "early_stop"],
    "Safety": ["checkpoint", "guard", "anomaly"],
    "Looking": ["progress", "jsonl", "tensorboard", "monitor", "throughput", "profiler", "ledger"],
}
"""The order a reader meets them in; a test holds it complete."""
INTRODUCTION = """\
Each is one line in a recipe, or `-p NAME` on the command line. Any stack of them is right, or is refused before it
starts with a message that names who clashes. `forge plugins NAME` prints what these pages say."""


def pages() -> dict[str, str]:
    """Every page by its file's name."""
    entries = registry.installed("plugin")
    lines = ["# Plugins", "", INTRODUCTION, ""]
    made: dict[str, str] = {}
    for group, names in GROUPS.items():
        lines += [f"## {group}", "", "| plugin | what it does |", "|---|---|"]
        for name in names:
            lines.append(f"| [{name}]({name}.md) | {registry.summary(entries[name])} |")
            made[f"{name}.md"] = plugin_page.markdown(name)
        lines.append("")
    return {"README.md": "\n".join(lines), **made}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
