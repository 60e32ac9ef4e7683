"""A checkpoint whose hashes are right and whose content is not is refused in one line, whatever part of it is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forge
from forge import options
from forge.checkpoint import StoredCheckpoint, write_checkpoint
from forge.cli import main
from forge.errors import CheckpointError, ForgeError
from forge.progress import Counters, Interval
from forge.testing import TinyTask, tiny_batches
from tests.support import limited
from tests.support.profiles import covering

ODD = {
    "text": "x",
    "infinite": float("inf"),
    "negative": -7,
    "half": 0.5,
    "nothing": None,
    "many": 10**400,
    "yes": True,
}


def fit(run: Path, **more: Any) -> Any:
    plugins = {"checkpoint": {"every": "1 updates"}, "guard": {}, "ema": {}}
    trainer = forge.Trainer(max_updates=4, seed=1, plugins=plugins, run_dir=run, **more)
    return trainer.fit(TinyTask(), tiny_batches())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = tmp_path_factory.mktemp("runs") / "run"
    forge.Trainer(max_updates=2, seed=1, plugins={"checkpoint": {}, "guard": {}, "ema": {}}, run_dir=run).fit(
        TinyTask(), tiny_batches()
    )
    return StoredCheckpoint.find(run).load()


def signed(folder: Path, tree: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> Path:
    """A checkpoint with a changed tree, and a manifest that is right about it."""
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    change(tree)
    write_checkpoint(folder / "update-00000002", tree)
    return folder / "update-00000002"


def refused(path: Path) -> str:
    with pytest.raises(ForgeError) as caught:
        fit(path.parent / "new", resume=path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    return str(caught.value)


@pytest.mark.parametrize(("field", "odd"), covering((field.name for field in fields(Counters)), ODD))
def test_every_counter_is_checked(field: str, odd: str, saved: dict[str, Any], tmp_path: Path) -> None:
    path = signed(tmp_path, saved, lambda tree: tree["progress"].update({field: ODD[odd]}))
    assert f"progress.{field} is" in refused(path)


@pytest.mark.parametrize(
    "part", ["planned_updates", "left_out", "rates_used", "rng", "metrics", "stack", "fingerprint"]
)
def test_every_part_has_its_type(part: str, saved: dict[str, Any], tmp_path: Path) -> None:
    assert part in refused(signed(tmp_path, saved, lambda tree: tree.update({part: "x"})))


@pytest.mark.parametrize("name", ["progress", "data", "task", "rng", "plugins"])
def test_a_missing_part_is_named(name: str, saved: dict[str, Any], tmp_path: Path) -> None:
    assert name in refused(signed(tmp_path, saved, lambda tree: tree.pop(name)))


@pytest.mark.parametrize(("name", "odd"), covering(["batches", "samples"], ODD))
def test_the_place_in_the_data_is_checked(name: str, odd: str, saved: dict[str, Any], tmp_path: Path) -> None:
    refused(signed(tmp_path, saved, lambda tree: tree["data"].update({name: ODD[odd]})))


def test_a_place_beyond_the_data_is_refused(saved: dict[str, Any], tmp_path: Path) -> None:
    assert "batches into an epoch" in refused(
        signed(tmp_path, saved, lambda tree: tree["data"].update(batches=10**9, samples=10**9))
    )


@pytest.mark.parametrize("part", ["optimizers", "means", "plugins"])
def test_state_that_its_owner_cannot_read_is_refused(part: str, saved: dict[str, Any], tmp_path: Path) -> None:
    refused(signed(tmp_path, saved, lambda tree: tree.update({part: {name: ["x"] for name in tree[part]}})))


@pytest.mark.parametrize("odd", [{"progress": ["x"]}, {"task": "x"}, {"task": {"class": 5, "options": []}}], ids=str)
def test_the_verbs_that_read_a_checkpoint_refuse_it(
    odd: dict[str, Any], saved: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = signed(tmp_path, saved, lambda tree: tree.update(odd))
    for words in (["ckpt", "show", str(path)], ["ckpt", "export", str(path), str(tmp_path / "out.safetensors")]):
        assert main(words) == 2, words
        assert "Use another checkpoint" in capsys.readouterr().err
    with pytest.raises(CheckpointError):
        TinyTask.from_checkpoint(path)


def test_a_request_of_an_earlier_version_is_taken(saved: dict[str, Any], tmp_path: Path) -> None:
    asked = {"kind": "validation", "reason": "", "asker": "task", "update": 2, "everywhere": True, "own": False}
    path = signed(tmp_path, saved, lambda tree: tree.update(requests=[asked]))
    assert fit(tmp_path / "new", resume=path).updates == 4


# -- numbers and names that are given ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [2**64, -(2**63) - 1, pytest.param(10**5000, id="many digits"), "x", 0.5, float("inf")]
)
def test_a_seed_that_torch_does_not_take_is_refused(seed: Any) -> None:
    for make in (partial(forge.Trainer, seed=seed), partial(forge.seed, seed)):
        with pytest.raises(ForgeError, match="seed"):
            make()


@pytest.mark.parametrize("seed", [0, 2**64 - 1, -(2**63)])
def test_a_seed_that_torch_takes_is_taken(seed: int) -> None:
    forge.seed(seed)
    assert forge.Trainer(seed=seed, max_updates=1).seed == seed


@pytest.mark.parametrize("kind", [int, float, int | None, list[int], dict[str, int]])
def test_a_number_beyond_64_bits_is_no_option(kind: Any) -> None:
    big: Any = {"a": 2**64} if kind == dict[str, int] else [2**64] if kind == list[int] else 2**64
    with pytest.raises(ForgeError, match="but it takes"):
        options.convert(big, kind, "it")


def test_an_interval_is_finite() -> None:
    with pytest.raises(ForgeError, match="is not an interval"):
        Interval("9" * 400 + " updates")


LONG = "n" * 300


COMMANDS = [
    ["plan", f"{LONG}.yaml"],
    ["fit", LONG],
    ["fit", "quickstart", "--run-dir", LONG],
    ["fit", "quickstart", f"trainer.run_dir={LONG}"],
    ["fit", "quickstart", 'trainer.run_dir="a\\0b"'],
    ["fit", f"{LONG}.py:Task"],
    ["runs", LONG],
    ["report", LONG],
    ["ckpt", "show", LONG],
    ["new", "task", LONG],
    ["new", "plugin", LONG],
    ["predict", "quickstart", "--weights", LONG],
    ["fit", "quickstart", "trainer.seed=18446744073709551616"],
    ["fit", "quickstart", "trainer.seed=1e400"],
    ["fit", "quickstart", "trainer.validate_every=" + "9" * 400 + " updates"],
    ["fit", "quickstart", f"-p=clip@{LONG}", f"clip@{LONG}.max_norm=x"],
]


def test_a_name_or_number_that_cannot_be_is_refused_in_a_line(tmp_path: Path) -> None:
    done = limited.call(partial(_in_folder, tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def _in_folder(folder: Path) -> int:
    os.chdir(folder)
    for words in COMMANDS:
        code = main(words)
        assert code == 2, words
    return 0
