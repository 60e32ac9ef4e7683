"""`RUN:best` on the command line: export, bench and serve take the best checkpoint, not the last weights."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge.cli import main
from forge_plugins import Checkpoint
from tests.conftest import PLAIN, REPO
from tests.support import forked
from tests.support.patience import PATIENCE
from tests.support.profiles import some
from tests.support.ships import Classifier, batches, trained_run

SHIPS = REPO / "tests" / "support" / "ships.py"
NAMED = ["--task", f"{SHIPS}:Classifier", "--data", f"{SHIPS}:data"]
BEST = "run:best"


@pytest.fixture(autouse=True)
def run(empty_folder: Path) -> torch.Tensor:
    """Train a run whose best checkpoint, that of the largest loss, is its first; return what it answers."""
    kept = Checkpoint(every="2 updates", best={"monitor": "val/loss", "mode": "max"})
    trained_run("run", kept, validate_every="2 updates")
    best = Classifier.from_checkpoint("run:best").eval()
    last = Classifier.from_checkpoint("run/weights.safetensors").eval()
    (images, _), *_ = batches()
    with torch.no_grad():
        expected = best(images)
        assert not torch.equal(expected, last(images))
    return expected


@pytest.mark.slow
def test_serve_answers_with_the_best_weights(run: torch.Tensor) -> None:
    command = [sys.executable, "-m", "forge", "serve", BEST, "--port", "0", *NAMED]
    paths = os.pathsep.join(path for path in sys.path if path)
    with forked.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **PLAIN, "PYTHONPATH": paths}
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"Serving run:best at http://127.0.0.1:(\d+)", line)
            assert found, line
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=PATIENCE)
            body = json.dumps({"images": batches()[0][0].tolist()})
            connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
            answer = json.load(connection.getresponse())
            connection.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=PATIENCE) == 0
        finally:
            process.kill()
    (values,) = answer["outputs"].values()
    assert torch.allclose(torch.tensor(values), run, atol=1e-5)


@pytest.mark.parametrize("words", some([["export", "--to", "pt2"], ["bench"], ["serve", "--port", "0"]], quick=1))
def test_a_run_without_a_best_checkpoint_says_how_to_keep_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trained_run("plain", Checkpoint(every="2 updates"))
    assert main([words[0], "plain:best", *words[1:], *NAMED]) == 2
    assert "checkpoint.best={monitor:" in capsys.readouterr().err
