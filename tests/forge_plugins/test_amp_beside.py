"""amp beside guard and anomaly, what it owns, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import forge
from forge.checkpoint import Checkpoints
from forge.errors import NonFiniteError, RecipeError, StackError, TaskError
from forge.testing import TinyTask, assert_same_weights, fit_tiny, tiny_batches
from forge_plugins import AMP, Anomaly, Checkpoint, Guard
from forge_plugins.amp import best_dtype
from tests.support.amp_kit import Scales, made, trained
from tests.support.profiles import covering

# -- with guard and anomaly -------------------------------------------------------------------------------------------


def with_nan(*bad: int, count: int = 6) -> list[Any]:
    data = tiny_batches([8] * count)
    for index in bad:
        data[index][0][3, 2] = math.nan
    return data


@pytest.mark.parametrize(("policy", "amp_first"), covering(["stop", "skip", "rewind"], [True, False]))
def test_an_overflow_is_no_business_of_guard_and_anomaly(policy: str, amp_first: bool, tmp_path: Path) -> None:
    plain, watched, amp, anomaly = TinyTask(), TinyTask(), made("fp16"), Anomaly()
    expected = trained(plain, made("fp16"))
    others = [Guard(policy), anomaly]
    scales = Scales(amp)
    fit_tiny([amp, *others, scales] if amp_first else [*others, amp, scales], task=watched, run_dir=tmp_path)
    assert 2.0**19 in expected
    assert scales.seen == expected
    assert_same_weights(watched, plain)
    assert anomaly.findings == []


@pytest.mark.parametrize("amp_first", [True, False])
def test_guard_stops_at_a_bad_loss_with_the_weights_as_before(amp_first: bool) -> None:
    task, before = TinyTask(), TinyTask()
    stack = [AMP("fp16", init_scale=128.0), Guard()]
    with pytest.raises(NonFiniteError, match=r"Update 3 \(epoch 0\): the loss and the gradients of net"):
        fit_tiny(stack if amp_first else stack[::-1], task=task, train=with_nan(3))
    fit_tiny([AMP("fp16", init_scale=128.0)], task=before, train=with_nan(), max_updates=3)
    assert_same_weights(dict(task.named_parameters()), dict(before.named_parameters()))


@pytest.mark.parametrize("amp_first", [True, False])
def test_guard_skips_a_bad_window_and_leaves_no_trace_of_it(amp_first: bool) -> None:
    skipped, expected = TinyTask(dropout=0.0), TinyTask(dropout=0.0)
    stack = [AMP("fp16", init_scale=128.0), Guard("skip")]
    fit_tiny(stack if amp_first else stack[::-1], task=skipped, train=with_nan(3), max_epochs=1)
    data = [batch for index, batch in enumerate(with_nan()) if index != 3]
    fit_tiny([AMP("fp16", init_scale=128.0)], task=expected, train=data, max_epochs=1)
    assert_same_weights(skipped, expected)  # a scale of 64 instead of 128 moves no bit


@pytest.mark.parametrize("amp_first", [True, False])
def test_a_rewind_takes_the_scaler_back_too(amp_first: bool, tmp_path: Path) -> None:
    rewound, expected, amp = TinyTask(), TinyTask(), made("fp16")
    scales = Scales(amp)
    stack = [amp, Guard("rewind"), Checkpoint(every="2 updates", background=False)]
    stack = [*(stack if amp_first else stack[::-1]), scales]
    fit_tiny(stack, task=rewound, train=with_nan(5, count=8), max_epochs=1, run_dir=tmp_path)
    data = [batch for index, batch in enumerate(with_nan(count=8)) if index != 5]
    straight = trained(expected, made("fp16"), train=data, max_epochs=1)
    assert_same_weights(rewound, expected)
    # up to update 5 and its bad loss, then again from update 4 on; the window that is left out changes nothing
    assert scales.seen[6:] == [straight[4], straight[4], *straight[5:]]
    newest = Checkpoints(tmp_path / "checkpoints").newest_valid()
    assert newest is not None
    assert newest.load()["plugins"]["amp"]["scale"] == straight[-1]


def test_anomaly_names_the_layer_too_large_for_fp16() -> None:
    class Large(TinyTask):
        def training_step(self, batch: Any) -> Any:
            return F.cross_entropy(self.net.get_submodule("0")(batch[0] * 1e4) * 1e4, batch[1])

    anomaly = Anomaly()
    with pytest.raises(NonFiniteError):
        fit_tiny([AMP("fp16"), Guard(), anomaly], task=Large())
    assert anomaly.findings[0]["kind"] == "forward"
    assert anomaly.findings[0]["output"]["dtype"] == "float16"
    assert "* 1e4, batch[1])" in anomaly.findings[0]["place"]["code"]


# -- what it owns -----------------------------------------------------------------------------------------------------


def roles(trainer: forge.Trainer) -> set[tuple[str, str]]:
    calls = trainer.stack.calls().items()
    return {(hook, call.role) for hook, who in calls for call in who if call.plugin == "amp" and call.role != "event"}


FORWARD = {("forge_forward", "wrap"), ("forge_setup_env", "wrap")}
SCALES = {("forge_backward", "own"), ("forge_optimizer_step", "own")}


@pytest.mark.parametrize(
    ("asked", "best", "expected", "things"),
    [
        ("bf16", "fp16", FORWARD, ("autocast",)),
        ("fp16", "bf16", FORWARD | SCALES, ("autocast", "grad_scaler")),
        ("auto", "bf16", FORWARD, ("autocast",)),
        ("auto", "fp16", FORWARD | SCALES, ("autocast", "grad_scaler")),
    ],
)
def test_bf16_owns_nothing_and_fp16_backward_and_step(
    asked: str, best: str, expected: set[Any], things: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_plugins.amp.best_dtype", lambda device: best)
    amp, seen = AMP(asked), []

    @forge.on("start")
    def look(trainer: forge.Trainer) -> None:
        seen.append((roles(trainer), amp.provides))

    for _ in range(2):  # one object serves two runs
        trainer = forge.Trainer(plugins=[amp, look], max_updates=2, run_dir=False)
        trainer.fit(TinyTask(), tiny_batches())
    assert seen == [(expected, things)] * 2


@pytest.mark.parametrize(
    ("emulated_only", "device", "expected"),
    [(False, "cuda", "bf16"), (True, "cuda", "fp16"), (True, "cpu", "bf16"), (False, "mps", "fp16")],
)
def test_auto_is_bf16_where_the_hardware_has_it(
    emulated_only: bool, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chosen:
        def __init__(self, device: torch.device): ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr("torch.cuda.device", Chosen)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: not emulated_only)
    assert best_dtype(torch.device(device)) == expected


class Owner(forge.Plugin):
    @forge.hookimpl
    def forge_backward(self, loss: Tensor) -> bool:
        loss.backward()
        return True


class Against(forge.Plugin):
    conflicts = ("grad_scaler",)


def test_fp16_is_refused_beside_another_owner_and_bf16_is_not() -> None:
    for other in (Owner(), Against()):
        fit_tiny([AMP("bf16"), other], max_updates=1)
    with pytest.raises(StackError, match="'amp' and 'owner' both own forge_backward"):
        fit_tiny([AMP("fp16"), Owner()])
    with pytest.raises(StackError, match="'against' cannot run together with 'amp'"):
        fit_tiny([AMP("fp16"), Against()])


# -- refusals ---------------------------------------------------------------------------------------------------------


class WithLBFGS(TinyTask):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


def test_a_closure_optimizer_runs_with_bf16_only() -> None:
    with pytest.raises(StackError, match=r"fp16 cannot train with LBFGS.*Use amp\.dtype=bf16"):
        fit_tiny([AMP("fp16")], task=WithLBFGS())
    assert fit_tiny([AMP("bf16")], task=WithLBFGS(), max_updates=2)[1].updates == 2


def test_float16_weights_are_refused_with_fp16() -> None:
    with pytest.raises(TaskError, match=r"net\.0\.weight, net\.0\.bias.*are float16, .*no \.half\(\)"):
        fit_tiny([AMP("fp16")], task=TinyTask().half())
    frozen = TinyTask()
    frozen.net.get_submodule("0").half().requires_grad_(False)
    assert fit_tiny([AMP("fp16")], task=frozen, max_updates=2)[1].updates == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "auto.*bf16.*fp16"),
        ({"init_scale": 0.0}, r"amp\.init_scale is 0; it must be a number above 0"),
        ({"init_scale": math.inf}, r"amp\.init_scale is inf; it must be a number above 0"),
        ({"growth_interval": 0}, r"amp\.growth_interval is 0; it must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        AMP(**options)
