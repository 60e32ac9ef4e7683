"""`forge launch ray`: the driver, run on a local Ray of two bundles."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_cluster.launching import LaunchJob, ray_driver
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.slow


def test_the_driver_trains_on_two_bundles(tmp_path: Path) -> None:
    python = os.environ.get("FORGE_RAY_PYTHON") or (sys.executable if importlib.util.find_spec("ray") else None)
    if python is None:
        pytest.skip("needs ray, here or in the Python that FORGE_RAY_PYTHON names")
    job = LaunchJob(
        name="first",
        words=("quickstart", "trainer.max_epochs=1", "-p", "ddp", "-p", "no:tensorboard"),
        run_dir=str(tmp_path / "run"),
        nodes=2,
        python=sys.executable,
        folder=str(tmp_path),
        restarts=0,
    )
    (tmp_path / "driver.py").write_text(ray_driver(job, strategy="PACK"))
    environment = {**os.environ, "RAY_NUM_CPUS": "2", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, tmp_path / "driver.py"], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "forge exit code: 0" in done.stdout
    assert json.loads((tmp_path / "run/card.json").read_text())["world"] == 2
    assert (tmp_path / "run/weights.safetensors").exists()
