"""The plugin `kernels` on a CUDA device: it measures, decides, and trains what the run without it trains."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge import registry
from forge_plugins import AMP, Compile
from forge_speed.kernels import Kernels
from tests.support.toy_kernels import entries

pytestmark = pytest.mark.gpu
WIDTH, CLASSES = 1024, 8192
KERNELS = {
    "cross_entropy": "forge_kernels.ops.cross_entropy:CROSS_ENTROPY",
    "layer_norm": "forge_kernels.ops.norms:LAYER_NORM",
    "softmax": "forge_kernels.ops.softmax:SOFTMAX",
}


class Wide(forge.TaskModule):
    """Something for every kernel that is looked for."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=WIDTH**-0.5, generator=generator)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.norm(self.first(x) + F.softmax(x, -1))), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, others = entries(**KERNELS), registry.installed
    monkeypatch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2048, WIDTH, generator=generator), torch.randint(CLASSES, (2048,), generator=generator))
        for _ in range(2)
    ]


def trained(*plugins: forge.Plugin) -> tuple[Wide, float]:
    task = Wide()
    options: dict[str, Any] = {"max_updates": 6, "seed": 0, "run_dir": False, "device": "cuda", "log_every": 6}
    result = forge.Trainer(plugins=list(plugins), **options).fit(task, batches())
    return task, result.metrics["train/loss"]


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("use", ["auto", "all"])
def test_it_trains_what_is_trained_without_it(amp: bool, use: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge")
    originals = F.layer_norm, F.cross_entropy, F.softmax

    def around() -> list[forge.Plugin]:
        return [AMP("bf16")] if amp else []

    _, expected = trained(*around())
    task, loss = trained(*around(), Kernels(use))
    assert (F.layer_norm, F.cross_entropy, F.softmax) == originals
    assert loss == pytest.approx(expected, rel=1e-3)
    assert all(torch.isfinite(parameter).all() for parameter in task.parameters())
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("kernels")]
    if use == "auto":
        assert re.match(r"kernels: forward and backward of the first batch take \S+ ms as written, and", told[0])
    else:
        assert told == ["kernels: cross_entropy, layer_norm, softmax run where they support a call."]


def test_a_compiled_step_has_named_kernels_in_its_graph() -> None:
    _, expected = trained(Compile())
    _, loss = trained(Compile(fullgraph=True), Kernels(["layer_norm", "softmax"]))
    assert loss == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("use", ["auto", "all"])
def test_nothing_waits_for_the_device(use: str, syncs_are_errors: forge.Plugin) -> None:
    trained(Kernels(use), syncs_are_errors)
