"""staged: states on the nodes outlive a lost node, are whole or not there, and continue the run bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge.checkpoint import Checkpoints, manifest
from forge.errors import PeerFailed, RecipeError
from forge_cluster.staged import Staged
from forge_cluster.staged.bring import complete
from forge_cluster.staged.node import NodeFolder
from forge_plugins import DDP, EMA, FSDP, Checkpoint
from tests.support import forked
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

STRATEGIES = {"ddp": DDP, "fsdp": FSDP}


class Regressor(forge.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1)).double()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Cut(forge.Plugin):
    """Ends a run on all ranks after some updates, as a killed job would, without a last save."""

    def __init__(self, after: int):
        super().__init__()
        self.update = after

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run) -> None:
        if trainer.progress.update == self.update:
            raise KeyError("cut")


def loader() -> DataLoader[Any]:
    inputs = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8, shuffle=True)


def fit(place: Path, strategy: str, cut: int | None, resume: str | None = None) -> dict[str, Any]:
    """Train on this rank, each rank a node of its own."""
    os.environ["GROUP_RANK"] = os.environ.get("RANK", "0")
    forge.seed(3)
    several = [STRATEGIES[strategy]()] if "RANK" in os.environ else []
    levers = [EMA(0.9), Checkpoint(every=None, rehearse="off"), Staged("2 updates", folder=f"{place}/{{node}}")]
    plugins = [*several, *levers, *([] if cut is None else [Cut(cut)])]
    trainer = forge.Trainer(plugins=plugins, max_epochs=2, run_dir=place / "run", resume=resume)
    task = Regressor()
    try:
        trainer.fit(task, loader())
    except (KeyError, PeerFailed):
        return {"update": trainer.progress.update}
    finally:
        del os.environ["GROUP_RANK"]
    return {"resumed": trainer.resumed_from, "weights": {n: p.detach().clone() for n, p in task.named_parameters()}}


def node_of(place: Path, rank: int) -> Path:
    return place / f"{socket.gethostname()}-{rank}"


@pytest.mark.parametrize("strategy", some(STRATEGIES, quick=1))
@pytest.mark.parametrize("lost", some([1, 0, None], quick=1))
def test_a_run_that_loses_a_node_goes_on_from_its_neighbours_copy(tmp_path: Path, strategy: str, lost: int | None):
    whole = ranks(2)(fit, tmp_path / "whole", strategy, None)[0]
    assert not list((tmp_path / "whole").glob("*/forge-*/*"))  # a run that ended well leaves nothing on its nodes
    place = tmp_path / "cut"
    assert ranks(2)(fit, place, strategy, 7) == [{"update": 7}] * 2
    assert not Checkpoints(place / "run/checkpoints").all()
    if lost is not None:
        shutil.rmtree(node_of(place, lost))

    again = ranks(2)(fit, place, strategy, None, "auto")

    assert [each["resumed"] for each in again] == [6, 6]
    for each in again:
        torch.testing.assert_close(each["weights"], whole["weights"], rtol=0, atol=0)


def test_one_process_continues_from_the_memory_of_its_node(tmp_path: Path):
    whole = fit(tmp_path / "whole", "", None)
    fit(tmp_path / "cut", "", 5)
    again = fit(tmp_path / "cut", "", None, "auto")
    assert again["resumed"] == 4
    torch.testing.assert_close(again["weights"], whole["weights"], rtol=0, atol=0)


def test_a_damaged_part_takes_the_state_before_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    fit(tmp_path, "", 7)
    newest = next(node_of(tmp_path, 0).glob("*/*/update-00000006"))
    damaged = newest / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert fit(tmp_path, "", None, "auto")["resumed"] == 4
    assert "model.safetensors" in caplog.text
    assert "damaged" in caplog.text


def test_a_newer_checkpoint_is_preferred(tmp_path: Path):
    fit(tmp_path, "", 7)
    first = fit(tmp_path, "", 8, "auto")
    assert first == {"update": 8}
    states = next(node_of(tmp_path, 0).glob("*/*"))
    for state in states.iterdir():
        if state.name > "update-00000006":
            shutil.rmtree(state)
    assert Checkpoints(tmp_path / "run/checkpoints").all()[-1].name == "update-00000006"
    assert fit(tmp_path, "", None, "auto")["resumed"] == 6


def records(world: int) -> bytes:
    return manifest.encode({name: manifest.FileRecord(1, "0" * 64) for name in manifest.files_of(world)})


def test_a_state_counts_where_all_its_files_are_on_some_node():
    names, encoded = manifest.files_of(2), records(2)
    first, second = [names[0], names[1], names[3]], [names[2], names[4]]
    assert [found[0] for found in complete([{4: (encoded, first)}, {4: (None, second)}], -1)] == [4]
    assert not list(complete([{4: (encoded, first)}, {4: (None, second)}], 4))  # the run has it
    assert not list(complete([{4: (encoded, first)}, {}], -1))
    assert not list(complete([{4: (None, first)}, {4: (None, second)}], -1))  # not known to be whole
    older = [{4: (encoded, first), 6: (encoded, first)}, {4: (encoded, second)}]
    assert [found[0] for found in complete(older, -1)] == [4]


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    node = NodeFolder(str(tmp_path), Path("runs/a"))
    node.begin("update-00000002")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(forge.ForgeError, match="belongs to another user"):
        node.begin("update-00000004")


def test_a_relative_folder_is_refused():
    with pytest.raises(RecipeError, match="full path"):
        Staged(folder="here")


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.forge_cluster.test_staged import fit
place, left = sys.argv[1], int(sys.argv[2])
def count(event, arguments):
    global left
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree") and "/forge-" in str(arguments[0]):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
fit(Path(place), "", None, "auto")
"""
"""A run that is killed at the n-th touch of a file on its node."""


@pytest.mark.parametrize("touch", some([29, *range(1, 60, 4)], quick=1))
def test_a_kill_at_any_touch_of_a_file_leaves_whole_states(tmp_path: Path, touch: int):
    whole = fit(tmp_path / "whole", "", None)
    for _ in range(2):  # the second attempt resumes from what the first left
        command = [sys.executable, "-c", KILLED, str(tmp_path / "cut"), str(touch)]
        assert forked.Popen(command, cwd=Path(__file__).parents[2]).wait() == -signal.SIGKILL
    again = fit(tmp_path / "cut", "", None, "auto")
    assert again["resumed"] is None or again["resumed"] % 2 == 0
    torch.testing.assert_close(again["weights"], whole["weights"], rtol=0, atol=0)
