"""torchft: replicas train what one process trains; those that are left go on, and one that comes back joins them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.testing import TinyTask, tiny_batches
from forge_cluster.torchft import Torchft
from tests.conftest import REPO
from tests.support.patience import PATIENCE

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a replica by name, with a lighthouse for all of them."""
    pytest.importorskip("torchft", reason="needs torchft-nightly")
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    house = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, heartbeat_timeout_ms=1000)
    address = f"http://127.0.0.1:{house.address().rsplit(':', 1)[1]}"
    running: list[subprocess.Popen[bytes]] = []

    def begin(
        name: str, updates: int, pause: float = 0.15, die: int = -1, fail: int = -1, miss: int = -1, alone: bool = False
    ) -> Any:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        own = {} if alone else {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": name[-1]}
        words = [str(word) for word in (folder, updates, 0 if alone else pause, die, fail, miss)]
        command = [sys.executable, "-m", "tests.support.torchft_replica", *words]
        running.append(subprocess.Popen(command, cwd=REPO, env=os.environ | own))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()
    house.shutdown()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt")


def noted(folder: Path) -> list[tuple[int, int]]:
    """The updates that a replica began, and with how many."""
    return [(row["update"], row["of"]) for row in map(json.loads, (folder / "updates.jsonl").read_text().splitlines())]


def assert_as_one_process(tmp_path: Path, *names: str) -> None:
    expected = weights(tmp_path / "one")
    first = weights(tmp_path / names[0])
    for name in names:
        for key, value in weights(tmp_path / name).items():
            assert value.equal(first[key]), f"{name} differs from {names[0]} in {key}"
            torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-11)


@pytest.mark.slow
class TestReplicas:
    def test_one_alone_trains_the_bits_of_a_plain_run(self, start: Start, tmp_path: Path) -> None:
        assert start("one", 12, alone=True).wait(PATIENCE) == 0
        assert start("replica0", 12).wait(PATIENCE) == 0
        assert all(value.equal(weights(tmp_path / "one")[key]) for key, value in weights(tmp_path / "replica0").items())

    def test_one_that_is_killed_comes_back_while_others_train(self, start: Start, tmp_path: Path) -> None:
        assert start("one", 150, alone=True).wait(PATIENCE) == 0
        stays = start("replica0", 150)
        assert start("replica1", 150, die=10).wait(PATIENCE) == -9
        died = noted(tmp_path / "replica1")[-1][0]
        back = start("replica1", 150)
        assert (stays.wait(PATIENCE), back.wait(PATIENCE)) == (0, 0)
        assert_as_one_process(tmp_path, "replica0", "replica1")
        seen = noted(tmp_path / "replica0")
        assert [row for row in seen if row[0] == died] == [(died, 2), (died, 1)]  # the same update again, alone
        assert seen[-1] == (149, 2)  # together again at the end
        rest = [update for update, of in seen if (update, of) != (died, 1)]
        assert rest == list(range(rest[0], 150))  # it never went back

    def test_an_update_that_fails_is_trained_again_by_all(self, start: Start, tmp_path: Path) -> None:
        assert start("one", 60, alone=True).wait(PATIENCE) == 0
        replicas = start("replica0", 60), start("replica1", 60, fail=5)
        assert [replica.wait(PATIENCE) for replica in replicas] == [0, 0]
        assert_as_one_process(tmp_path, "replica0", "replica1")
        updates = [update for update, _ in noted(tmp_path / "replica1")]
        assert sum(later == earlier for earlier, later in itertools.pairwise(updates)) >= 1

    def test_one_that_missed_an_update_takes_over_the_state(self, start: Start, tmp_path: Path) -> None:
        assert start("one", 60, alone=True).wait(PATIENCE) == 0
        stays, missed = start("replica0", 60), start("replica1", 60, miss=5)
        assert (stays.wait(PATIENCE), missed.wait(PATIENCE)) == (0, 0)
        assert_as_one_process(tmp_path, "replica0", "replica1")
        seen = noted(tmp_path / "replica1")
        assert sum(of == 2 for _, of in seen) >= 6
        # no update is trained again: the other one had finished the one that failed here
        assert [update for update, _ in seen] == list(range(seen[0][0], 60))


class TestRefusals:
    def fit(self, task: Any, **options: Any) -> None:
        forge.Trainer(max_updates=1, max_epochs=None, plugins=[Torchft(**options)], run_dir=False).fit(
            task, tiny_batches()
        )

    def test_without_a_lighthouse_the_command_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
        with pytest.raises(forge.StackError, match="torchft_lighthouse --bind"):
            self.fit(TinyTask())

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torchft.manager", None)
        with pytest.raises(forge.StackError, match="pip install torchft-nightly"):
            self.fit(TinyTask(), lighthouse="http://127.0.0.1:1")

    def test_an_optimizer_with_a_closure_is_refused(self) -> None:
        class Closed(TinyTask):
            def configure_optimizers(self) -> Any:
                return torch.optim.LBFGS(self.parameters())

        with pytest.raises(forge.StackError, match="torchft cannot train with LBFGS"):
            self.fit(Closed(), lighthouse="http://127.0.0.1:1")

    def test_several_optimizers_are_refused(self) -> None:
        class Two(TinyTask):
            def configure_optimizers(self) -> Any:
                first, *rest = self.parameters()
                return {"a": torch.optim.SGD([first], lr=0.1), "b": torch.optim.SGD(rest, lr=0.1)}

            def training_step(self, batch: Any, name: str = "a") -> Any:
                return super().training_step(batch)

        with pytest.raises(forge.StackError, match="torchft trains with one optimizer"):
            self.fit(Two(), lighthouse="http://127.0.0.1:1")

    @pytest.mark.parametrize(("option", "value"), [("least", 0), ("timeout", 0.0)])
    def test_impossible_options_are_refused(self, option: str, value: float) -> None:
        with pytest.raises(forge.RecipeError, match=f"torchft.{option} is 0; it must be above 0"):
            Torchft(**{option: value})
