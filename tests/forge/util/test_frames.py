"""Which source files are the user's, and which belong to forge, torch or pluggy."""

from __future__ import annotations

import pluggy
import pytest
import torch.nn.functional

import forge.engine.trainer
import forge_kernels
import forge_lightning
import forge_plugins.clip
from forge.util.frames import folder_of, is_library
from forge_recipes import gpt


@pytest.mark.parametrize(
    "module", [forge.engine.trainer, forge_kernels, forge_lightning, forge_plugins.clip, pluggy, torch.nn.functional]
)
def test_files_of_forge_and_torch_are_libraries(module: object) -> None:
    assert is_library(str(module.__file__))  # pyright: ignore[reportAttributeAccessIssue]


def test_other_files_are_the_users() -> None:
    assert not is_library(__file__)
    assert not is_library(str(gpt.__file__))  # a recipe is a copy to start from
    assert not is_library(f"{folder_of('forge')[:-1]}_mine/task.py")  # only the folder itself counts
    assert is_library("<string>")
