"""Write docs/ready/: what `forge ready` says of the recipe quickstart, a LightningModule and a small transformer.

    python docs/make_ready.py [NAME ...]

Each folder there has ready.md and its pictures, as the command writes them. Times are those of the machine.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from forge import cli

DOCS = Path(__file__).parent
FOLDER = DOCS / "ready"
ADDED = """

class Run{name}(forge.LightningAdapter):
    def __init__(self):
        super().__init__({name}())


def data():
    return forge.data.Splits(train, val)
"""
"""What makes a task for the command line of the LightningModule on its page, and of its loaders."""
WRITER = """
def decode(tokens):
    return "".join(chr(token + 32) for token in tokens)


def data():
    words = "the quick brown fox jumps over a lazy dog and runs home ".split()
    pick = torch.Generator().manual_seed(0)
    text = " ".join(words[int(i)] for i in torch.randint(len(words), (4000,), generator=pick))
    rows = torch.tensor([ord(letter) - 32 for letter in text[: len(text) // 32 * 32]]).view(-1, 32)
    batches = [{"input_ids": part, "labels": part} for part in rows.split(16)]
    return forge.data.Splits(batches[8:], batches[:8])
"""
"""Data for the language model of docs/hugging-face.md: words in no order, and what shows them."""


def block(page: str, start: str, end: str) -> str:
    """Return the part of a page's Python from a line that begins so, up to another."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE))
    return code[code.index(start) : code.index(end, code.index(start))]


def targets(folder: Path) -> dict[str, list[str]]:
    """Return the arguments of `forge ready` for each folder; files that they name are written."""
    sums = block("from-lightning.md", "import lightning.pytorch", "def make_sums") + "\nimport forge\n"
    (folder / "sums.py").write_text(sums + ADDED.format(name="Sums"))
    writer = block("hugging-face.md", "import torch", "tokens = torch.randint") + WRITER
    (folder / "writer.py").write_text(writer)
    return {
        "quickstart": ["quickstart"],
        "lightning": [str(folder / "sums.py:RunSums")],
        "transformers": [str(folder / "writer.py:Writer"), "trainer.max_epochs=20"],
    }


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as place:
        for name, words in targets(Path(place)).items():
            if not names or name in names:
                code = cli.main(["ready", *words, "--price", "2.50", "--out", str(FOLDER / name)])
                if code > 2:  # a signal
                    return code
                (FOLDER / name / "ready.html").unlink()
                (FOLDER / name / "ready.md").rename(FOLDER / name / "index.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
