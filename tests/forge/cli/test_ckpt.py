"""forge ckpt: what it shows of checkpoints, what it finds damaged, what it finds different, and what it exports."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import forge
from forge.checkpoint import Checkpoints
from forge.checkpoint import StoredCheckpoint as SavedState
from forge.checkpoint.checkpoint import TensorInfo
from forge.cli import ckpt, ckpt_diff
from forge.testing import TinyTask, assert_same, fit_tiny
from forge_plugins import EMA, SWA, Checkpoint

Call = Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their seed: /a and /b, with checkpoints after 5, 8 and 10 updates; 5 is the best."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 0), ("b", 1)):
        plugin = Checkpoint(["1 epoch", "8 updates"], keep=3, best={"monitor": "val/loss", "mode": "min"})
        fit_tiny([plugin], seed=seed, run_dir=folder / name)
    return folder


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two averages, of which `ema` was exported; `swa` begins after the checkpoint of update 5."""
    folder = tmp_path_factory.mktemp("averaged")
    fit_tiny([EMA(0.9), SWA("1 epoch", every="2 updates", evaluate=False), Checkpoint()], run_dir=folder)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of a run that a test may damage."""
    subprocess.run(["cp", "-r", made / "a", tmp_path / "a"], check=True)
    return tmp_path / "a"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call("show", path)`: the exit code and the standard output."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words: str | Path) -> tuple[int, str]:
        code = ckpt.run(ckpt.parser().parse_intermixed_args([str(word) for word in words]))
        return code, capsys.readouterr().out

    return run


def checkpoint_of(run: Path, update: int) -> Path:
    return Checkpoints(run / "checkpoints").path(update)


# -- show -------------------------------------------------------------------------------------------------------------


def test_a_run_is_shown_as_a_table_of_its_checkpoints(call: Call, made: Path) -> None:
    code, out = call("show", made / "a")
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("update-")}
    assert code == 0
    assert "3 checkpoints" in out
    assert "val/loss" in out
    assert list(lines) == ["update-00000005", "update-00000008", "update-00000010"]
    assert lines["update-00000005"].rstrip().endswith("valid, best")
    assert lines["update-00000010"].rstrip().endswith("valid, latest")
    assert lines["update-00000010"].split()[1] == "2"


def test_a_damaged_checkpoint_is_listed_with_what_is_wrong(call: Call, run: Path) -> None:
    (checkpoint_of(run, 8) / "state.json").write_bytes(b"{}")
    code, out = call("show", run)
    assert code == 0
    assert "state.json is damaged" in next(line for line in out.splitlines() if line.startswith("update-00000008"))
    assert out.count("valid") == 2


def test_one_checkpoint_is_shown_with_all_that_describes_it(call: Call, made: Path) -> None:
    code, out = call("show", made / "a" / "checkpoints" / "best")
    assert code == 0
    for text in (
        "update-00000005  valid",
        "TinyTask(seed=0, dropout=0.2, lr=0.1)",
        "update=5",
        "epoch=1",
        "seed=0, window=1",
        f"torch={torch.__version__}",
        "checkpoint(every=",
        "model.net.0.weight",
        "(8, 6)",
        "optimizers … momentum_buffer",
    ):
        assert text in out, text


def test_show_as_json_is_json_even_where_a_metric_is_nan(call: Call, tmp_path: Path) -> None:
    class Nothing(TinyTask):
        def evaluation_end(self, stage: str) -> dict[str, Any]:
            return {"odd": float("nan")}

    fit_tiny([Checkpoint()], task=Nothing(), run_dir=tmp_path)
    listed = json.loads(call("show", tmp_path, "--json")[1], parse_constant=pytest.fail)
    assert [row["progress"]["update"] for row in listed["checkpoints"]] == [5, 10]
    assert listed["checkpoints"][0]["metrics"]["val/odd"] is None
    one = json.loads(call("show", "--json", tmp_path / "checkpoints" / "latest")[1], parse_constant=pytest.fail)
    assert one["progress"]["epoch"] == 2
    assert {"name": "model.net.0.weight", "shape": [8, 6], "dtype": "float32", "bytes": 192} in one["tensors"]


def test_an_outline_describes_every_tensor_and_reads_none(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = SavedState(checkpoint_of(made / "a", 5))
    weight = checkpoint.load()["model"]["net.0.weight"]
    monkeypatch.setattr("forge.checkpoint.tensors.read_tensors", lambda *words: pytest.fail("a tensor was read"))
    described = checkpoint.outline()["model"]["net.0.weight"]
    assert described == TensorInfo(tuple(weight.shape), "float32", weight.nbytes, "model:net.0.weight")


def test_averages_are_named_with_how_to_get_them(call: Call, averaged: Path, made: Path) -> None:
    out = call("show", averaged / "checkpoints" / "latest")[1]
    assert "averages" in out
    assert "ema (export --weights ema), swa (export --weights swa)" in out
    assert "plugins.ema …" in out
    assert "swa (export" not in call("show", checkpoint_of(averaged, 5))[1]
    assert json.loads(call("show", "--json", averaged / "checkpoints" / "latest")[1])["averages"] == ["ema", "swa"]
    assert "averages" not in call("show", checkpoint_of(made / "a", 5))[1]


# -- verify -----------------------------------------------------------------------------------------------------------


def test_whole_checkpoints_verify_with_0(call: Call, made: Path) -> None:
    code, out = call("verify", made / "a", checkpoint_of(made / "b", 5))
    assert code == 0
    assert "4 checkpoints verified: all whole" in out


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def cut(file: Path) -> None:
    os.truncate(file, 7)


def link(file: Path) -> None:
    elsewhere = file.rename(file.parents[2] / file.name)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (flip, "is damaged"),
        (cut, "is damaged"),
        (Path.unlink, "is incomplete: it has no"),
        (link, "cannot be opened as a plain file"),
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "state.safetensors"])
def test_damage_is_found_in_its_file_and_gives_1(call: Call, run: Path, name: str, damage: Any, word: str) -> None:
    damage(checkpoint_of(run, 8) / name)
    code, out = call("verify", run)
    found = next(line for line in out.splitlines() if "update-00000008" in line)
    assert code == 1
    assert name in found
    assert word in found
    assert "3 checkpoints verified: 1 damaged" in out
    assert sum("whole" in line.split() for line in out.splitlines()) == 2


# -- diff -------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_and_its_copy_are_bit_identical(call: Call, made: Path, run: Path) -> None:
    code, out = call("diff", made / "a", run)
    assert code == 0
    assert "bit-identical: 18 tensors" in out


def test_two_runs_differ_in_settings_and_results(call: Call, made: Path) -> None:
    code, out = call("diff", made / "a", made / "b")
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert code == 1
    assert lines["fingerprint.seed"] == ["0", "1"]
    assert lines["model"][:3] == ["8", "of", "9"]
    assert "net.0.weight" in lines["model"]
    assert 0 < float(lines["model"][3]) < 10


def test_tensors_and_values_are_compared_as_bits() -> None:
    zero = torch.zeros(2)
    assert ckpt_diff.compare({"a": 0.0}, {"a": -0.0})["values"] == [("a", 0.0, -0.0)]
    (row,) = ckpt_diff.compare({"m": {"t": zero, "u": zero}}, {"m": {"t": torch.zeros(3)}})["tensors"]
    assert (row["differ"], row["of"], row["largest"]) == (2, 2, None)
    assert row["first"] == "t (float32(2,) against float32(3,))"


# -- export -----------------------------------------------------------------------------------------------------------


def test_the_weights_of_a_checkpoint_become_one_file(call: Call, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "best.safetensors"
    code, said = call("export", made / "a" / "checkpoints" / "best", out)
    assert code == 0
    assert "9 tensors" in said
    assert "after 5 updates" in said
    task = TinyTask.from_checkpoint(checkpoint_of(made / "a", 5))
    assert_same(load_file(out), task)
    assert_same(TinyTask.from_checkpoint(out), task)


def test_an_existing_file_is_overwritten_only_by_force(call: Call, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    out.write_text("precious")
    with pytest.raises(forge.ForgeError, match=r"exists.*--force"):
        call("export", made / "a", out)
    assert out.read_text() == "precious"
    assert call("export", "--force", made / "a", out)[0] == 0
    assert "net.0.weight" in load_file(out)


@pytest.mark.parametrize("name", ["ema", "swa", "raw"])
def test_an_average_becomes_a_file_of_its_own(call: Call, averaged: Path, tmp_path: Path, name: str) -> None:
    for source in (averaged, averaged / "checkpoints" / "latest"):
        out = tmp_path / f"{source.name}.safetensors"
        code, said = call("export", source, out, "--weights", name)
        expected = TinyTask.from_checkpoint(averaged / "checkpoints" / "latest", weights=name)
        assert code == 0
        assert (f"9 tensors, averaged by {name}," in said) == (name != "raw")
        assert_same(load_file(out), expected)
        assert_same(TinyTask.from_checkpoint(out, weights=name), expected)
    three = [TinyTask.from_checkpoint(averaged, weights=which).net[0].weight for which in ("ema", "swa", "raw")]
    assert len({tuple(weight.flatten().tolist()) for weight in three}) == 3


def test_an_unknown_average_is_answered_with_those_there_are(
    call: Call, averaged: Path, made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "w.safetensors"
    with pytest.raises(forge.CheckpointError, match=r"holds no average called 'emma'\. Did you mean 'ema'\?"):
        call("export", averaged, out, "--weights", "emma")
    with pytest.raises(forge.CheckpointError, match=r"holds no average called 'polyak'\. Known: ema, swa\."):
        call("export", averaged, out, "--weights", "polyak")
    with pytest.raises(forge.CheckpointError, match=r"No plugin of its run keeps one"):
        call("export", made / "a", out, "--weights", "ema")
    with pytest.raises(forge.CheckpointError, match=r"update-00000005: the plugin 'swa' had averaged nothing yet"):
        call("export", checkpoint_of(averaged, 5), out, "--weights", "swa")
    assert not out.exists()


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["show", "a", "b"], ["diff", "a"], ["export", "a"], ["export", "a", "b", "c"]])
def test_a_wrong_number_of_paths_is_answered_with_the_usage(call: Call, words: list[str]) -> None:
    with pytest.raises(forge.ForgeError, match=f"Write: forge ckpt {words[0]} PATH"):
        call(*words)
