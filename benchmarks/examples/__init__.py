"""The examples of docs/examples.md beside the same in Lightning: `python -m benchmarks.examples` counts their lines.

forge's code is on the pages of the documentation, where the tests run it; Lightning's is in `in_lightning/`. Both are
formatted by `ruff format` with lines of 120 characters. What both are given (a network that a recipe has, a script that
draws pictures) is counted for neither.
"""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
IN_LIGHTNING = Path(__file__).parent / "in_lightning"
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Example:
    """A task of a new user: where forge's code is, and the file with Lightning's."""

    title: str
    page: str
    blocks: slice
    "Which of the page's Python blocks are the example; others make data, or check results."
    twin: str

    @property
    def code(self) -> str:
        """Return forge's code as the page shows it."""
        found = re.findall(
            r"^```py(?:thon)?\n(.*?)^```$", (REPO / self.page).read_text(), flags=re.MULTILINE | re.DOTALL
        )
        return "\n\n".join(found[self.blocks])

    @property
    def twin_code(self) -> str:
        return (IN_LIGHTNING / self.twin).read_text()


EXAMPLES = [
    Example("Image classifier", "docs/images-in-folders.md", slice(1, 3), "shapes.py"),
    Example("Two losses", "docs/examples/two-losses.md", slice(0, 1), "orders.py"),
    Example("Staged fine-tuning", "docs/examples/staged-finetuning.md", slice(0, 1), "staged.py"),
    Example("Sequence to sequence", "docs/examples/sequence-to-sequence.md", slice(0, 1), "backwards.py"),
    Example("VAE", "docs/examples/vae.md", slice(0, 1), "vae.py"),
    Example("Plain inference", "docs/deployment/plain-code.md", slice(1, 2), "infer.py"),
    Example("Sweep", "docs/sweeps.md", slice(0, 1), "sweep.py"),
    Example("Notebook", "docs/notebooks.md", slice(0, 1), "cell.py"),
    Example("Hugging Face", "docs/hugging-face.md", slice(0, 1), "writer.py"),
    Example("Another logger", "docs/writing-loggers.md", slice(0, 1), "sqlite_logger.py"),
    Example("Two-tower retrieval", "docs/examples/two-tower-retrieval.md", slice(0, 2), "retrieval.py"),
    Example("PPO", "docs/examples/ppo.md", slice(0, 2), "cart_pole.py"),
    Example("Distillation", "docs/examples/distillation.md", slice(0, 2), "distillation.py"),
    Example("DPO", "docs/examples/dpo.md", slice(0, 2), "dpo.py"),
    Example("k-fold cross-validation", "docs/groups.md", slice(0, 1), "kfold.py"),
    Example("Mixup and CutMix", "docs/examples/mixup.md", slice(1, 3), "mixup.py"),
    Example("Warm restarts", "docs/examples/warm-restarts.md", slice(0, 2), "restarts.py"),
    Example("A plugin of your own", "docs/examples/own-plugin.md", slice(0, 1), "autoclip.py"),
]


def lines_of_code(text: str) -> int:
    """Count the lines that are neither blank nor a comment alone."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({line for t in tokens if t.type not in NOT_CODE for line in range(t.start[0], t.end[0] + 1)})
