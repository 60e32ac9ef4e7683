"""An export holds what was trained: it is verified in a fresh process, and what is broken is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import forge
from forge.cli import main
from forge.errors import ForgeError
from forge_plugins import EMA, Checkpoint
from forge_ship import card
from forge_ship import export_formats as formats
from forge_ship.commands.export import print_export
from forge_ship.engine import ExportError
from forge_ship.export_formats import pt2, torchscript
from forge_ship.open_engine import open_engine
from forge_ship.operators import import_libraries
from forge_ship.structure import flat
from forge_ship.verify import ExportMismatch
from tests.support.profiles import some
from tests.support.ships import Classifier, batches, trained_run

LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("aoti", "executorch")]


def exported(task: forge.TaskModule, folder: Path, to: str = "torchscript", **options: Any) -> Any:
    return forge.export(task, to=to, out=folder, data=batches(), **options)


# -- what is proved ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [*some(["pt2", "torchscript", "onnx"], quick=2), *LONG])
def test_an_export_computes_what_the_task_computes(to: str, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")
    elif to == "executorch":
        pytest.importorskip("executorch")
    task = Classifier().train()
    made = exported(task, tmp_path, to)
    found = json.loads(card.place_of(made.path).read_text())
    assert found == made.card
    assert (found["format"], found["method"]) == (to, "forward")
    assert [(port["name"], port["dtype"], port["shape"]) for port in found["inputs"] + found["outputs"]] == [
        ("images", "float32", ["batch", 4]),
        ("output", "float32", ["batch", 3]),
    ]
    verification = found["verification"]
    assert verification["sizes"] == [1, 3, 5, 8]
    assert verification["metrics_after"].keys() == {"val/loss", "val/accuracy"}
    for name, before in verification["metrics_before"].items():
        assert verification["metrics_after"][name] == pytest.approx(before, rel=1e-5)
    for name, noted in found["files"].items():
        assert card.hashed(tmp_path / name) == noted
    assert task.training
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({card.place_of(made.path).name, made.path.name})


class AnyLength(forge.TaskModule):
    """A layer at every place, and the mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

    def forward(self, sequence: Tensor) -> Tensor:
        return self.net(sequence).mean(1)

    def validation_step(self, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self(batch).square().mean()}


@pytest.mark.slow
def test_executorch_takes_the_largest_sizes_of_the_data(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    data = [torch.randn(6, 5, 3), torch.randn(4, 9, 3)]
    made = forge.export(AnyLength(), to="executorch", out=tmp_path, data=data)
    (port,) = made.card["inputs"]
    assert made.card["limits"] == {"batch": [1, 6], port["shape"][1]: [1, 9]}
    assert made.card["verification"]["sizes"] == [1, 3, 4, 6]


def changed_weight(real: Any, plan: Any, path: Path) -> None:
    weight = plan.model.task.last.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] += 0.05
    real(plan, path)
    with torch.no_grad():
        weight.copy_(before)


def swapped_axis(real: Any, plan: Any, path: Path) -> None:
    class Swapped(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.inner(*inputs).flip(1)

    whole, plan.model = plan.model, Swapped(plan.model)
    real(plan, path)
    plan.model = whole


def test_a_broken_exporter_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pt2.write
    monkeypatch.setattr(pt2, "write", lambda plan, path: changed_weight(real, plan, path))
    with pytest.raises(
        ExportMismatch, match=r"output 'output'.*entries, by up to 0\.\d+, 0\.\d+ of the largest; 1e-05"
    ):
        exported(Classifier(), tmp_path, "pt2")
    assert list(tmp_path.iterdir()) == []


def test_weights_alone_are_the_tasks_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.first

    made = exported(Tied(), tmp_path, "safetensors")
    assert made.card["verification"]["weights"] == 4
    print_export(made)
    assert "has read 4 tensors: each is the task's." in capsys.readouterr().out


def nudged(weights: dict[str, Tensor]) -> None:
    weights["last.bias"] = torch.nextafter(weights["last.bias"], torch.tensor(9.0))


WRONG_WEIGHTS = [
    (nudged, "in last.bias: 3 of 3 entries"),
    (lambda weights: weights.pop("last.bias"), "in last.bias: only the second has it"),
    (lambda weights: weights.update(extra=torch.zeros(1)), "in extra: only the first has it"),
    (
        lambda weights: weights.update({"last.bias": torch.zeros(2)}),
        r"in last.bias: float32\(2,\) against float32\(3,\)",
    ),
]


@pytest.mark.parametrize(("change", "said"), WRONG_WEIGHTS)
def test_weights_that_differ_are_caught(
    change: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(plan: Any, path: Path) -> None:
        weights = dict(plan.model.task.state_dict())
        change(weights)
        save_file(weights, path)

    monkeypatch.setattr(formats.module_of("safetensors"), "write", changed)
    with pytest.raises(ExportMismatch, match=f"differ from the task's {said}"):
        exported(Classifier(), tmp_path, "safetensors")


def test_a_metric_that_is_not_the_tasks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_ship.verify.compare_outputs", lambda *args, **options: _empty())
    real = torchscript.write
    monkeypatch.setattr(torchscript, "write", lambda plan, path: swapped_axis(real, plan, path))
    with pytest.raises(ExportMismatch, match=r"val/\w+ is .* with the trained task"):
        exported(Classifier(), tmp_path)


def _empty() -> Any:
    from forge_ship.verify import ExportVerdict

    return ExportVerdict()


# -- what is refused --------------------------------------------------------------------------------------------------


class Bare(Classifier):
    forward = nn.Module.forward  # pyright: ignore[reportAssignmentType]
    validation_step = forge.TaskModule.validation_step  # pyright: ignore[reportAssignmentType]


class Branching(Classifier):
    def forward(self, images: Tensor) -> Tensor:
        if images.sum() > 0:
            return super().forward(images)
        return -super().forward(images)


class Fixed(Classifier):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.reshape(8, 4) if len(images) == 8 else images)


REFUSED = {
    "no method": (Bare, {}, ["has no forward", "def forward(self, images)"]),
    "control flow": (Branching, {"to": "pt2"}, ["torch.cond", "--to torchscript", "test_export.py"]),
    "a size": (Fixed, {"to": "pt2"}, ["'batch'", "fixes"]),
    "format": (Classifier, {"to": "tflite"}, ["no format 'tflite'"]),
    "no file": (Classifier, {"out": None}, ["Name the file"]),
    "suffix": (Classifier, {"to": "onnx", "out": "model.pt2"}, ["ends in .onnx"]),
    "no data": (Classifier, {"data": None}, ["data="]),
    "axes": (Classifier, {"dynamic": "pixels:1"}, ["INPUT:AXIS", "images (2 axes)"]),
    "quantised weights": (Classifier, {"to": "safetensors", "quantize": "int8-static"}, ["weights alone"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_refused(case: str, tmp_path: Path) -> None:
    kind, options, words = REFUSED[case]
    given: dict[str, Any] = {"to": "torchscript", "out": tmp_path / "out", "data": batches(), **options}
    with pytest.raises(ForgeError) as refused:
        forge.export(kind(), **given)
    assert [word for word in words if word not in str(refused.value)] == []
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    exported(Classifier(), tmp_path, "safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ExportError, match="--force"):
        exported(Classifier(), tmp_path, "safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    exported(Classifier(), tmp_path, "safetensors", force=True)
    assert (tmp_path / "model.safetensors").read_bytes() != before


def test_a_missing_package_is_named_with_its_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(ExportError, match=r"onnxruntime: pip install 'forge-trainer\[export\]'"):
        exported(Classifier(), tmp_path, "onnx")


# -- cards from elsewhere ---------------------------------------------------------------------------------------------

HOSTILE = {
    "no JSON": b"\x00",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "another format": {"format": "pickle"},
    "no inputs": {"inputs": []},
    "a name with a slash": {"inputs": [{"name": "../x", "dtype": "float32", "shape": [1]}]},
    "an odd type": {"inputs": [{"name": "x", "dtype": "object", "shape": [1]}]},
    "an odd shape": {"outputs": [{"name": "x", "dtype": "float32", "shape": [None]}]},
    "a negative size": {"inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", -5]}]},
    "half a size": {"inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 0.5]}]},
    "libraries that are no names": {"libraries": [1]},
    "no files": {"files": {}},
    "another hash": {"files": {"model.ts": {"sha256": "0" * 64}}},
}


@pytest.fixture(scope="module")
def exported_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    return forge.export(Classifier(), to="torchscript", out=folder, data=batches(), batches=1).path


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_card_is_refused(case: str, exported_file: Path, tmp_path: Path) -> None:
    change = HOSTILE[case]
    (tmp_path / "model.ts").write_bytes(exported_file.read_bytes())
    values = json.loads(card.place_of(exported_file).read_text())
    body = change if isinstance(change, bytes) else json.dumps(values | change).encode()
    card.place_of(tmp_path / "model.ts").write_bytes(body)
    with pytest.raises(ExportError):
        open_engine(tmp_path / "model.ts")


def test_a_file_without_a_card_is_refused(exported_file: Path, tmp_path: Path) -> None:
    (tmp_path / "model.ts").write_bytes(exported_file.read_bytes())
    with pytest.raises(ExportError, match=r"export\.json"):
        open_engine(tmp_path / "model.ts")


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (torch.zeros(2, 5), "batch × 4"),
        (torch.zeros(2, 4, dtype=torch.float64), "must be float32"),
        (torch.zeros(4), "batch × 4"),
    ],
)
def test_inputs_are_checked_whatever_the_runtime_does(images: Tensor, said: str, exported_file: Path) -> None:
    with pytest.raises(ExportError, match=said):
        open_engine(exported_file)({"images": images})
    with pytest.raises(ExportError, match="takes images"):
        open_engine(exported_file)({"pixels": torch.zeros(2, 4)})


# -- the command line -------------------------------------------------------------------------------------------------

TASK = """
from tests.support.ships import Classifier as Base, batches
from forge.data import Splits

class Classifier(Base):
    pass

def data():
    return Splits(train=batches(), val=batches())
"""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TASK)
    plugins = EMA(0.5), Checkpoint(every="2 updates", best={"monitor": "val/loss", "mode": "min"})
    trained_run(tmp_path / "run", *plugins, task=type("HeldByNoModule", (Classifier,), {})())
    return tmp_path / "run"


def test_a_run_is_exported_from_the_command_line(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = str(run_folder.parent / "mine.py")
    words = ["export", str(run_folder), "--to", "torchscript"]
    assert main(words) == 2
    assert "--task FILE.py:Task" in capsys.readouterr().err
    (alone := run_folder.parent / "alone.py").write_text(TASK.replace("def data(", "def other("))
    assert main([*words, "--task", f"{alone}:Classifier"]) == 2
    assert "--data FILE.py:function" in capsys.readouterr().err
    assert main([*words, "--task", f"{alone}:Classifier", "--data", f"{alone}:other", "--out", str(alone.parent)]) == 0
    assert main([*words, "--task", f"{mine}:Classifier"]) == 0, "its file has `data`"
    printed = capsys.readouterr().out
    assert "best, ema weights of update 6" in printed
    assert "val/accuracy" in printed
    assert (
        json.loads((run_folder / "export" / "torchscript" / "model.ts.export.json").read_text())["weights"]
        == "best, ema"
    )


def test_a_mismatch_gives_1_and_leaves_nothing(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torchscript.write
    monkeypatch.setattr(torchscript, "write", lambda plan, path: changed_weight(real, plan, path))
    mine = str(run_folder.parent / "mine.py")
    words = ["export", str(run_folder), "--to", "torchscript", "--task", f"{mine}:Classifier", "--data", f"{mine}:data"]
    assert main(words) == 1
    assert "Nothing was written" in capsys.readouterr().err
    assert not (run_folder / "export").exists()


@pytest.mark.slow
def test_two_exports_stand_in_one_folder(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, out = str(run_folder.parent / "mine.py"), run_folder.parent / "out"
    words = ["export", str(run_folder), "--task", f"{mine}:Classifier", "--data", f"{mine}:data", "--out", str(out)]
    assert main([*words, "--to", "pt2", "--to", "torchscript"]) == 0
    assert main([*words, "--to", "safetensors"]) == 0
    assert {path.name.removesuffix(".export.json") for path in out.iterdir()} == {
        "model.pt2",
        "model.ts",
        "model.safetensors",
    }
    images = torch.randn(3, 4)
    found = [open_engine(out / name)({"images": images})["output"] for name in ("model.pt2", "model.ts")]
    assert torch.allclose(found[0], found[1], atol=1e-5)
    capsys.readouterr()
    assert main([*words[:-1], str(out / "one.ts"), "--to", "pt2", "--to", "torchscript"]) == 2
    assert "name a folder" in capsys.readouterr().err


class Nested(Classifier):
    def forward(self, images: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits = super().forward(images)
        return {"logits": logits, "more": [{"twice": 2 * logits}, {"twice": 3 * logits}]}

    def training_step(self, batch: Any) -> Any:
        return {"loss": self(batch[0])["logits"].square().mean()}

    validation_step = training_step


class Boxes(Nested):
    def forward(self, images: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [{"boxes": part} for part in super().forward(images)["logits"].unbind(1)]

    def training_step(self, batch: Any) -> Any:
        return {"loss": self(batch[0])[0]["boxes"].square().mean()}

    validation_step = training_step


def loaded(path: Path) -> Any:
    return torch.jit.load(str(path)) if path.suffix == ".ts" else torch.export.load(path).module()


@pytest.mark.parametrize("to", ["torchscript", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_program_returns_what_the_task_returns(to: str, tmp_path: Path) -> None:
    images = torch.randn(3, 4)
    made = exported(Classifier(), tmp_path / "tensor", to)
    assert isinstance(loaded(made.path)(images), Tensor)
    assert made.card["returns"] == "tensor"
    made = exported(Boxes(), tmp_path / "boxes", to)
    assert [each.keys() for each in loaded(made.path)(images)] == [{"boxes"}] * 3
    made = exported(Nested(), tmp_path / "nested", to)
    found = loaded(made.path)(images)
    if to == "pt2":
        assert found["more"][1]["twice"].shape == (3, 3)
    else:  # it has no type for a dict of such values
        assert len(found) == 3
        assert "returns a tuple of logits, more_0_twice, more_1_twice" in made.notes[0]


def test_a_program_of_another_structure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_ship.export.plain", flat)
    with pytest.raises(ExportMismatch, match=r'returns \["tensor"\]; the task returns "tensor"'):
        exported(Classifier(), tmp_path)


@pytest.mark.slow
def test_of_what_a_card_names_only_libraries_for_torch_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lying_about.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    import_libraries(["lying_about", "antigravity", "os.path", ""])
    assert not {"lying_about", "antigravity"} & sys.modules.keys()
