"""Quantised models: smaller, close to the model, exportable, and refused where nothing would be gained."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from forge.checkpoint.folder import find
from forge.errors import ForgeError
from forge.testing import fit_tiny
from forge_plugins import Checkpoint
from forge_ship import quantize as module
from forge_ship.engine import ExportError
from forge_ship.int8 import activation_grid
from forge_ship.qat import QAT, install, remove
from forge_ship.quantize import (
    DOES_NOT_WORK,
    KINDS,
    in_torchs_operators,
    onnx_translations,
    quantize,
    ranges_of,
    refusal,
    weight_bytes,
)
from tests.support.profiles import some

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")

CPU = ["int8-dynamic", "int8-static", "int8-weights"]
BATCHES = (1, 3, 64)


class Net(nn.Module):
    """Takes any number of tensors and returns a tuple, as what forge exports; 90 % of its weights are linear."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.task = nn.Sequential(
                *(nn.Conv2d(1, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
                *(nn.Linear(288, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 16)),
            )
            norm: Any = self.task[1]
            norm.running_mean.normal_(std=0.1)
            norm.running_var.uniform_(0.5, 2)
            nn.init.uniform_(norm.weight, -2, 2)  # a negative factor turns the sign of a channel

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.task(inputs[0]),)


MODEL = Net().eval()


def examples(batches: tuple[int, ...] = (16, 64, 5)) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 1, 8, 8, generator=generator),) for n in batches]


def shapes() -> Any:
    return (({0: Dim("batch")},),)


class OnDemand(dict[str, nn.Module]):
    """The model in each kind that is asked for."""

    def __missing__(self, kind: str) -> nn.Module:
        return self.setdefault(kind, quantize(MODEL, kind, examples(), dynamic_shapes=shapes()))


@pytest.fixture(scope="module")
def made() -> dict[str, nn.Module]:
    return OnDemand()


def difference(model: Any, other: Any, batch: int = 64) -> float:
    """Return the largest difference of outputs, in deviations of the model's."""
    (x,) = examples((batch,))[0]
    with torch.no_grad():
        expected, found = model(x)[0], other(x)[0]
    return float((found - expected).abs().max() / expected.std(correction=0))


# -- values and sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "near"), some(zip(CPU, (0.1, 0.15, 0.05), strict=True)))
def test_outputs_are_close_to_the_models(made: dict[str, nn.Module], kind: str, near: float) -> None:
    assert 0 < difference(Net().eval(), made[kind]) < near


@pytest.mark.parametrize(("kind", "share"), some(zip(CPU, (0.38, 0.30, 0.38), strict=True)))
def test_weights_take_fewer_bytes(made: dict[str, nn.Module], kind: str, share: float) -> None:
    assert weight_bytes(made[kind]) < share * weight_bytes(Net())


def test_the_model_itself_stays_as_it_is(made: dict[str, nn.Module]) -> None:
    before = Net().state_dict()
    assert MODEL.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in MODEL.state_dict().items())


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", CPU)
def test_a_pt2_file_runs_in_a_fresh_process(made: dict[str, nn.Module], kind: str, tmp_path: Path) -> None:
    program = torch.export.export(made[kind], examples((4,))[0], dynamic_shapes=shapes())
    torch.export.save(in_torchs_operators(program), tmp_path / "model.pt2")
    inputs = [examples((batch,))[0][0] for batch in BATCHES]
    torch.save((inputs, [made[kind](x)[0] for x in inputs]), tmp_path / "cases.pt")
    code = (
        "import sys, torch\n"
        "model = torch.export.load('model.pt2').module()\n"
        "for x, expected in zip(*torch.load('cases.pt')): assert torch.equal(model(x)[0], expected)\n"
        "assert 'torchao' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in CPU if (kind, "onnx") not in DOES_NOT_WORK])
def test_an_onnx_file_gives_the_same(made: dict[str, nn.Module], kind: str, tmp_path: Path) -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    file = tmp_path / "model.onnx"
    torch.onnx.export(
        made[kind],
        examples((4,))[0],
        file,
        dynamo=True,
        dynamic_shapes=shapes(),
        external_data=False,
        verbose=False,
        custom_translation_table=onnx_translations(),
    )
    session = onnxruntime.InferenceSession(str(file))
    name = session.get_inputs()[0].name

    def run(x: Tensor) -> list[Tensor]:
        return [torch.from_numpy(array) for array in session.run(None, {name: x.numpy()})]

    assert all(difference(made[kind], run, batch) < 0.05 for batch in BATCHES)
    stored = sum(len(tensor.raw_data) for tensor in onnx.load(file).graph.initializer)
    assert stored < 0.38 * weight_bytes(Net())


# -- ranges that qat has learnt ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_learnt_ranges_give_the_rounded_models_outputs() -> None:
    """What was validated in training is what is exported, although batch norm is folded into the weights."""
    model, (x,) = Net(), examples((64,))[0]
    rounding = module_rounding(model)
    model.train()
    model(x)
    model.eval()
    with torch.no_grad():
        expected = model(x)[0]
    found = ranges_of({"ranges": {name: layer.get_buffer("_qat_range") for name, layer in rounding.items()}})
    for layer in rounding.values():
        remove(layer)
    int8 = quantize(model, "int8-static", examples((16,)), dynamic_shapes=shapes(), ranges=found)
    with torch.no_grad():
        close = (int8(x)[0] - expected).abs() <= 0.02 * expected.std()  # a rounding may fall to the other side
    assert close.float().mean() > 0.98


def module_rounding(model: nn.Module) -> dict[str, nn.Module]:
    from forge_ship.qat import FORWARDS

    layers = {name: layer for name, layer in model.named_modules() if type(layer) in FORWARDS}
    for layer in layers.values():
        install(layer)
    return layers


def test_exactly_the_layers_with_a_range_are_quantised() -> None:
    int8 = quantize(
        Net().eval(), "int8-static", examples((4,)), dynamic_shapes=shapes(), ranges={"task.5": (-1.0, 2.0)}
    )
    shapes_of_integers = [tuple(t.shape) for t in int8.state_dict().values() if t.dtype is torch.int8]
    assert shapes_of_integers == [(32, 288)]


def test_ranges_come_from_a_checkpoint(tmp_path: Path) -> None:
    fit_tiny([QAT(), Checkpoint()], run_dir=tmp_path)
    state = find(tmp_path).load()["plugins"]["qat"]
    found = ranges_of(state, prefix="task.")
    assert found.keys() == {"task.net.0", "task.net.4"}
    assert all(low < high for low, high in found.values())


# -- grids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 3.0), (-3.0, -0.5), (0.0, 0.0)])
def test_the_grid_of_activations_is_torchaos(low: float, high: float) -> None:
    from torchao.quantization.pt2e import MinMaxObserver

    observer = MinMaxObserver(dtype=torch.uint8, quant_min=0, quant_max=255, eps=torch.finfo(torch.float32).eps)
    observer(torch.tensor([low, high]))
    scale, zero = observer.calculate_qparams()
    found = activation_grid(torch.tensor(low), torch.tensor(high))
    assert found[0] == scale
    assert found[1] == zero


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "model", "device", "message"),
    [
        ("int7", nn.Linear(4, 4), "cpu", "--quantize int7 is unknown. Known are int8-dynamic"),
        ("fp8", nn.Linear(32, 32), "cpu", "compute capability 8.9 or more; the device is cpu"),
        ("int8-dynamic", nn.LSTM(4, 4), "cpu", "would change nothing: the model has no nn.Linear"),
        ("int8-weights", nn.Conv2d(1, 4, 3), "cpu", "would change nothing: .* int8-static takes convolutions too"),
    ],
)
def test_what_cannot_be_quantised_is_refused(kind: str, model: nn.Module, device: str, message: str) -> None:
    reason = refusal(kind, model, device)
    assert reason is not None
    with pytest.raises(ExportError, match=message):
        quantize(model, kind, [(torch.zeros(2, 4),)], device=device)


def test_a_format_that_does_not_work_says_why() -> None:
    for (kind, to), reason in DOES_NOT_WORK.items():
        assert kind in KINDS
        text = refusal(kind, Net(), "cpu", to)
        assert text == f"--quantize {kind} does not work with --to {to}: {reason}"
    assert refusal("int8-static", Net(), "cpu", "onnx") is None


def test_a_missing_torchao_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(ForgeError, match=r"pip install 'forge-trainer\[export\]'"):
        quantize(Net().eval(), "int8-weights", examples((4,)))
