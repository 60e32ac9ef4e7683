"""docs/ray.md on a local Ray of two workers: a fit in each, one of which is killed. It needs "ray[train]"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.docs_pages import blocks
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.slow
PROGRAM = """
import json, os, signal, sys

ray.init(num_cpus=2, include_dashboard=False)
storage, plain = str(Path("runs").absolute()), Classifier


class Killed(plain):
    def training_step(self, batch):
        mark = Path(storage, "shot")
        if self.trainer.progress.update == 20 and self.trainer.env.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)


found = {"straight": on_ray("straight", storage)}
Killed.__name__, Classifier = Classifier.__name__, Killed
found["killed"] = on_ray("killed", storage)
Classifier = plain
fit("runs/alone")
said = {name: [result.metrics, result.checkpoint.path, str(result.error)] for name, result in found.items()}
Path("found.json").write_text(json.dumps(said))
"""


def test_a_killed_worker_is_restarted_and_the_run_ends_in_the_same_bits(empty_folder: Path) -> None:
    pytest.importorskip("ray.train")
    (page,) = blocks("docs/ray.md", "py")
    (empty_folder / "fit_on_ray.py").write_text(page.text.partition("\n\nif __name__")[0] + PROGRAM)
    quiet = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "fit_on_ray.py"]
    done = subprocess.run(command, cwd=empty_folder, env=quiet, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    runs, found = empty_folder / "runs", json.loads((empty_folder / "found.json").read_text())

    assert (runs / "shot").exists()
    cards = {name: json.loads((runs / name / "forge/card.json").read_text()) for name in ("straight", "killed")}
    assert [card["world"] for card in cards.values()] == [2, 2]
    assert cards["straight"]["resumed_from"] is None
    assert cards["killed"]["resumed_from"] in (15, 20)
    straight, killed = (load_file(runs / name / "forge/weights.safetensors") for name in cards)
    alone = load_file(runs / "alone/weights.safetensors")
    for name in alone:
        assert torch.equal(straight[name], killed[name])
        torch.testing.assert_close(straight[name], alone[name], rtol=1e-6, atol=1e-6)

    assert found["straight"][0] == found["killed"][0]
    assert found["straight"][0]["train/loss"] > 0
    for name, (_, checkpoint, error) in found.items():
        assert error == "None"
        assert (runs / name) in Path(checkpoint).parents
        assert (Path(checkpoint) / "manifest.json").exists()
        assert list((runs / name / "forge/tensorboard").glob("events.*"))
