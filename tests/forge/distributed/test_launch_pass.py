"""`forge validate`, `test` and `predict` with `--nproc`: the ranks of one pass, and what they say as one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from forge.checkpoint import load_weights
from forge.cli import main
from forge.distributed import launch as launching
from forge.testing import TinyTask, tiny_batches
from tests.support import forked
from tests.support.patience import PATIENCE

SIZES = (8, 7, 1)
"""Two ranks take 4 and 4, 3 and 4, and of the last batch one takes the only sample, the other none."""
TASK = f"""
import os
from forge.data import Splits
from forge.testing import TinyTask, tiny_batches

class Small(TinyTask):
    def test_step(self, batch):
        if os.environ.get("RANK") == "1":
            raise ValueError("rank 1 has had enough")
        return self.validation_step(batch)

    def predict_step(self, batch):
        return {{"logits": self(batch[0]), "rank": batch[1] * 0 + int(os.environ.get("RANK", 0))}}

def data():
    uneven = tiny_batches({SIZES}, seed=3)
    return Splits(train=tiny_batches(), val=uneven, test=uneven, predict=uneven)
"""
PLAIN = ("-p", "no:progress", "-p", "no:tensorboard", "trainer.seed=1", "trainer.device=cpu")
Forge = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def small(empty_folder: Path) -> None:
    (empty_folder / "small.py").write_text(TASK)


@pytest.fixture
def trained(empty_folder: Path) -> TinyTask:
    """The task with the weights of a run in the folder `run`."""
    assert main(["fit", "small.py", *PLAIN, "-q", "trainer.max_epochs=1", "--run-dir", "run"]) == 0
    task = TinyTask()
    load_weights(task, "run")
    return task.eval()


@pytest.fixture
def on_two_ranks(empty_folder: Path) -> Forge:
    """(exit code, stdout, stderr) of a verb with the trained weights and `--nproc 2`."""

    def run(verb: str, *words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "forge", verb, "small.py", *PLAIN, "-p", "ddp", "--nproc", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160"}
        done = forked.run([*command, "--weights", "run", *words], env=environment, timeout=PATIENCE)
        return done.returncode, done.stdout, done.stderr

    return run


def metrics(out: str) -> dict[str, str]:
    """Values as they were printed, by name; older versions of torch let gloo talk on stdout."""
    lines = [line.split() for line in out.splitlines() if not line.startswith("[Gloo]")]
    assert lines[0] == ["metric", "value"]
    return {line[0]: line[1] for line in lines[1:]}


def test_two_ranks_validate_to_the_metrics_of_one_process(
    trained: TinyTask, on_two_ranks: Forge, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = on_two_ranks("validate")
    assert code == 0, err
    assert out.count("metric") == 1  # rank 0's
    found = metrics(out)

    x, y = (torch.cat(part) for part in zip(*tiny_batches(SIZES, seed=3), strict=True))
    with torch.inference_mode():
        logits = trained(x)
    assert float(found["val/accuracy"]) == int((logits.argmax(1) == y).sum()) / sum(SIZES)
    assert float(found["val/loss"]) == pytest.approx(float(cross_entropy(logits, y)), rel=1e-4)

    assert main(["validate", "small.py", *PLAIN, "--weights", "run"]) == 0
    alone = metrics(capsys.readouterr().out)
    assert alone["val/accuracy"] == found["val/accuracy"]
    assert float(alone["val/loss"]) == pytest.approx(float(found["val/loss"]), rel=1e-4)


@pytest.mark.slow
def test_two_ranks_write_predictions_in_the_order_of_data(trained: TinyTask, on_two_ranks: Forge) -> None:
    code, out, err = on_two_ranks("predict", "--out", "both.safetensors")
    assert code == 0, err
    assert out.count("predict split -> both.safetensors") == 1
    written = load_file("both.safetensors")
    with torch.inference_mode():
        logits = trained(torch.cat([x for x, _ in tiny_batches(SIZES, seed=3)]))
    torch.testing.assert_close(written["logits"], logits)
    assert written["rank"].tolist() == [0] * 4 + [1] * 4 + [0] * 3 + [1] * 4 + [1]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_what_all_ranks_would_refuse_is_refused_at_once(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching.Launch, "run", lambda self, words: pytest.fail("started"))
    assert main([verb, "small.py", *PLAIN, "--nproc", "2"]) == 2
    assert "Add -p ddp" in capsys.readouterr().err
    assert main([verb, "small.py", *PLAIN, "-p", "ddp", "--nproc", "0"]) == 2
    assert "--nproc is 0" in capsys.readouterr().err
