"""guard and anomaly on a CUDA device: nothing waits, and nothing bad is saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.checkpoint import Checkpoints
from forge.errors import NonFiniteError
from forge.snapshot.non_finite import all_finite
from forge_plugins import Accumulate, Anomaly, Checkpoint, Guard
from tests.support.tasks import Classifier, fit, make_batches

pytestmark = pytest.mark.gpu


class Fused(Classifier):
    """Dropout, batch normalisation, a fused optimizer."""

    def __init__(self, kind: str = "Adam", **options: Any):
        super().__init__()
        self.kind, self.options = kind, {"fused": True, **options}
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.nn.functional.dropout(self.norm(x), 0.2, self.training))

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.kind)(self.parameters(), lr=1e-2, **self.options)


def made(task: Any = Fused, **options: Any) -> Any:
    torch.manual_seed(0)
    return task(**options)


def batches(*bad: int, count: int = 8) -> list[Any]:
    pinned = [(x.pin_memory(), y.pin_memory()) for x, y in make_batches(count)]
    for index in bad:
        pinned[index][0][1, 2] = math.nan
    return pinned


def parameters(task: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in task.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"kind": "SGD", "momentum": 0.9}, {"kind": "AdamW"}])
def test_finite_training_is_the_same_bit_for_bit(policy: str, options: dict[str, Any]) -> None:
    plain, guarded = made(**options), made(**options)
    expected = fit(plain, batches(), device="cuda", seed=1)
    result = fit(guarded, batches(), device="cuda", seed=1, plugins=[Guard(policy)])
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), guarded.state_dict().values(), strict=True)
    )
    assert result.metrics == expected.metrics


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"kind": "SGD"}, {"kind": "SGD", "momentum": 0.9}])
@pytest.mark.parametrize("window", [1, 2])
def test_stop_leaves_the_weights_as_before_the_bad_update(options: dict[str, Any], window: int) -> None:
    task, before = made(**options), made(**options)
    with pytest.raises(NonFiniteError, match=r"Update 3 \(epoch 0\): the loss"):
        fit(task, batches(3 * window, count=12), device="cuda", seed=1, plugins=[Guard(), Accumulate(window)])
    fit(before, batches(count=12), device="cuda", seed=1, max_updates=3, plugins=[Accumulate(window)])
    assert same(parameters(task), parameters(before))


@pytest.mark.parametrize("order", [1, -1])
def test_no_checkpoint_holds_what_a_bad_update_left(order: int, tmp_path: Path) -> None:
    """Batch normalisation's statistics are ruined by the bad forward at once, long before the host hears of it."""
    stack = [Guard(), Checkpoint(every="1 updates", keep=9, background=False)][::order]
    with pytest.raises(NonFiniteError, match="Update 3"):
        fit(made(), batches(3), device="cuda", plugins=stack, run_dir=tmp_path)
    newest = Checkpoints(tmp_path / "checkpoints").newest_valid()
    assert newest is not None
    assert newest.update == 3
    assert all_finite([value for value in newest.weights().values() if value.is_floating_point()])


def test_anomaly_names_operation_and_sample_on_the_device() -> None:
    class Logs(Fused):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return torch.nn.functional.nll_loss(self(x).softmax(-1).mul((x[:, :1] < 5).float()).log(), y)

    train = batches()
    train[3][0][2] = 9.0
    anomaly = Anomaly()
    with pytest.raises(NonFiniteError) as caught:
        fit(made(Logs), train, device="cuda", plugins=[Guard(), anomaly])
    finding = anomaly.findings[0]
    assert (finding["update"], finding["op"], finding["kind"], finding["rows"]) == (3, "aten.log", "forward", [2])
    assert "Where it came from:" in caught.value.__notes__[0]
