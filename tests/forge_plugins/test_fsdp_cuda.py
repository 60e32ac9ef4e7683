"""fsdp on a CUDA device: one rank over NCCL trains what plain PyTorch trains, without waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import forge
from forge.testing import tiny_batches
from forge_plugins import AMP, EMA, Accumulate, Clip, Compile, Guard, Remat, Schedule
from forge_plugins.fsdp import FSDP
from forge_plugins.tensor_parallel import TensorParallel
from tests.support.fsdp_kit import Deep, deep

pytestmark = pytest.mark.gpu


class Fused(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class Tempered(Fused):
    """A parameter without a dimension, after all others."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype=dtype)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature * super().forward(x)


def batches(count: int = 12) -> list[Any]:
    return [(x.pin_memory(), y.pin_memory()) for x, y in tiny_batches([8] * count)]


def train(plugins: list[Any], kind: type[Deep] = Fused, **options: Any) -> Deep:
    task = deep(kind, dtype=torch.float32)
    options = {"max_epochs": 2, "seed": 0, "device": "cuda", "run_dir": False, "log_every": 4, **options}
    forge.Trainer(plugins=plugins, **options).fit(task, batches(), batches(2))
    return task


def levers() -> list[Any]:
    return [AMP("bf16"), Accumulate(3), Clip(0.5), EMA(0.9), Remat(), Schedule("linear"), Guard()]


@pytest.mark.parametrize("kind", [Fused, Tempered])
@pytest.mark.parametrize(
    "options", [{}, {"reshard": False}, {"offload": True}], ids=["sharded", "kept until backward", "on the host"]
)
def test_one_rank_over_nccl_trains_what_plain_training_does(options: dict[str, Any], kind: type[Deep]) -> None:
    # the host's AdamW rounds differently, and in bf16 a last bit is a large one: offloading is compared in float32
    plain, sharded = (
        train([*(levers()[1:] if options.get("offload") else levers()), *strategy], kind)
        for strategy in ([], [FSDP(**options)])
    )
    assert dist.get_backend() != "gloo"
    for (name, ours), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert type(ours) is nn.Parameter
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-5, msg=name)


def test_blocks_compile_and_compute_in_bf16() -> None:
    plain = train([Accumulate(2)])
    compiled = train([Accumulate(2), Compile(blocks="Block"), FSDP(mixed_precision="bf16")])
    x = torch.cat([x for x, _ in batches()]).cuda()
    difference = (compiled(x) - plain(x)).abs().max() / plain(x).abs().max()
    assert difference < 0.1


def test_weights_drawn_on_the_host_are_those_of_a_full_task() -> None:
    full = deep(Fused, dtype=torch.float32)
    with torch.device("meta"):
        task = deep(Fused, dtype=torch.float32)
    started: dict[str, Tensor] = {}

    @forge.on("start")
    def look(trainer: forge.Trainer) -> None:
        for name, parameter in trainer.task.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.device.type == "cuda"
            started[name] = parameter.full_tensor().detach().cpu().clone()

    trainer = forge.Trainer(max_updates=2, device="cuda", run_dir=False, plugins=[FSDP(), look])
    trainer.fit(task, batches())
    assert all(torch.equal(started[name], value) for name, value in full.state_dict().items())


def test_a_mesh_that_one_process_cannot_make_is_refused() -> None:
    plan: Any = {"blocks.*.fc1": "column", "blocks.*.fc2": "row"}
    with pytest.raises(forge.ForgeError, match="1 processes cannot be arranged as tensor 2"):
        train([FSDP(), TensorParallel(2, plan=plan)])
