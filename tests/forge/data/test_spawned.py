"""Workers that are started by spawn from a script without a guard around its work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge.testing import TinyTask

data = TensorDataset(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))
train = DataLoader(data, 4, num_workers=1, multiprocessing_context="spawn")
forge.Trainer(max_epochs=1, seed=0, device="cpu", plugins=[]).fit(TinyTask(), train)
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_of_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "DataError: Worker 0" in done.stderr
    assert "DataError: A data worker runs this fit as it starts." in done.stderr
    assert done.stderr.count("if __name__ == '__main__'") == 2
    assert len(list((tmp_path / "runs").glob("*/*"))) == 1  # the worker made no run folder
