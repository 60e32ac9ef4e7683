"""The Python of the README and of every page runs, from top to bottom, as one module."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import forge.testing
from forge.testing import check_plugin, mend_interpreter
from tests.conftest import PROFILE
from tests.support.docs_pages import blocks, with_blocks
from tests.support.plugin_kit import PLAINEST

LONG = {
    "docs/groups.md": "tests/forge/runs/test_group.py makes groups",
    "docs/ready.md": "tests/forge_doctor/test_ready.py walks the road",
    "docs/examples/mixup.md": "tests/docs/test_example_loops.py trains it beside a plain loop",
    "docs/examples/two-tower-retrieval.md": "as above",
    "docs/examples/own-plugin.md": "as above",
    "docs/deployment/index.md": "tests/forge_ship exports a smaller task",
    "docs/deployment/pt2.md": "tests/forge_ship exports to every format",
    "docs/deployment/onnx.md": "as above",
    "docs/deployment/aoti.md": "as above, and calls a compiler",
    "docs/deployment/weights.md": "as above",
    "docs/deployment/torchscript.md": "as above",
    "docs/examples/staged-finetuning.md": "tests/docs/test_examples.py takes its first steps",
    "docs/examples/sequence-to-sequence.md": "as above",
    "docs/sweeps.md": "tests/forge_sweep sweeps a smaller task",
    "docs/writing-kernels.md": "tests/forge_kernels has the same checks of kernels",
    "docs/initialisation.md": "tests/forge_doctor trains such nets, and names their gradients and first losses",
    "docs/images-in-folders.md": "tests/docs/test_commands.py trains its task",
    "docs/from-lightning.md": "as above",
    "docs/examples/two-losses.md": "tests/forge/metrics/test_torchmetrics.py logs such metrics",
    "docs/examples/vae.md": "a task like any other",
    "docs/graphs.md": "as above",
    "docs/examples/distillation.md": "tests/docs/test_several_models.py trains it, beside a plain loop",
    "docs/examples/byol.md": "as above",
    "docs/examples/dpo.md": "as above",
    "docs/examples/gan.md": "as above",
    "docs/hugging-face.md": "tests/recipes/test_hf_text.py trains a smaller model",
}
"""Pages that are run in the full profile only, and what stands for them in the quick one."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in with_blocks("python")]
)
def test_the_python_on_a_page_runs_from_top_to_bottom(
    page: str,
    empty_folder: Path,
    small_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if not torch.cuda.is_available():
        mend_interpreter()  # kernels on a page run in Triton's interpreter here
    if PROFILE == "quick":
        monkeypatch.setattr(forge.testing, "check_plugin", check_in_part)
    module = page_as_module(page, empty_folder)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    for name, value in list(vars(module).items()):
        if name.startswith("test_"):  # with the fixtures that it asks for
            value(**{fixture: request.getfixturevalue(fixture) for fixture in inspect.signature(value).parameters})


OTHERS = ["leaks", "files", "graphs", "exceptions", "order"]
"""Checks that the full profile has."""


def check_in_part(plugin: Any, leave_out: Iterable[str] = (), **given: Any) -> forge.testing.PluginReport:
    """`check_plugin` as the quick profile has it: a page checks a dozen plugins, which takes a second each."""
    return check_plugin(plugin, leave_out=[*leave_out, *PLAINEST, *OTHERS], **given)


def page_as_module(page: str, folder: Path) -> ModuleType:
    """The Python of a page as one module, each line where it stands on the page, so that tracebacks point there."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    path = folder / f"{Path(page).stem.replace('-', '_').lower()}.py"
    path.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    assert spec is not None
    return importlib.util.module_from_spec(spec)
