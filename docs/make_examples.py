"""Draw the pictures of docs/examples.md: run the examples of the pages for longer, and keep what they logged.

    python docs/make_examples.py

It takes a few minutes on a CPU. Writes docs/pictures/examples/, and prints the last text and metrics of each example.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

REPO = Path(__file__).resolve().parent.parent
PICTURES = REPO / "docs" / "pictures" / "examples"

EXAMPLES = {
    "shapes.py": ("images-in-folders", slice(1, 3)),
    "orders.py": ("examples/two-losses", slice(0, 1)),
    "staged.py": ("examples/staged-finetuning", slice(0, 1)),
    "backwards.py": ("examples/sequence-to-sequence", slice(0, 1)),
    "vae.py": ("examples/vae", slice(0, 1)),
}
"""The page of each, and which of its Python blocks are the example."""
EPOCHS = {"shapes.py": 60, "orders.py": 30, "staged.py": 24, "backwards.py": 40, "vae.py": 60}
"""How long each is trained for its picture."""
CURVES = {"orders.py": "f1", "staged.py": "accuracy", "backwards.py": "accuracy"}
"""The metric that is drawn, for those that log no picture."""


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, (page, used) in EXAMPLES.items():
        with tempfile.TemporaryDirectory() as folder:
            keep(name, train(name, "\n\n".join(blocks(page)[used]), Path(folder)))


def blocks(page: str) -> list[str]:
    """The Python of a page."""
    text = (REPO / "docs" / f"{page}.md").read_text()
    return re.findall(r"^```py(?:thon)?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def train(name: str, code: str, folder: Path) -> Path:
    """Run an example, after what its page does first; return its run folder."""
    made = blocks("images-in-folders")[:1] if name == "shapes.py" else []
    longer = re.sub(r"max_epochs=\d+", f"max_epochs={EPOCHS[name]}", code)
    (folder / name).write_text("\n".join([*made, longer, "print(result.metrics)"]))
    subprocess.run([sys.executable, name], cwd=folder, check=True, env={**os.environ, "NO_COLOR": "1"})
    (card,) = folder.glob("runs/*/card.json")
    return card.parent


def keep(name: str, run: Path) -> None:
    """Copy the last picture of a run, or draw its curve; print its last text."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "tensors": 0}).Reload()
    for tag in events.Tags()["images"]:
        (PICTURES / name.replace(".py", ".png")).write_bytes(events.Images(tag)[-1].encoded_image_string)
    for tag in events.Tags()["tensors"]:
        if tag.startswith("val/"):
            print(events.Tensors(tag)[-1].tensor_proto.string_val[0].decode())
    if name in CURVES:
        script = [str(REPO / "docs" / "make_curves.py"), str(run), "--metric", CURVES[name]]
        wanted = ["--name", name.removesuffix(".py"), "--out", str(PICTURES)]
        subprocess.run([sys.executable, *script, *wanted], check=True)


if __name__ == "__main__":
    main()
