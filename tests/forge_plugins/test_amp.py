"""amp: autocast and a loss scaler as one writes them by hand, bit for bit, and at peace with everybody else."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

import forge
from forge.checkpoint import Checkpoints
from forge.errors import NonFiniteError, RecipeError, StackError, TaskError
from forge.testing import TinyGAN, TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import AMP, Accumulate, Anomaly, Checkpoint, Clip, Guard
from forge_plugins.amp import best_dtype
from tests.support import reference
from tests.support.amp_kit import HIGH, Scales, made, trained
from tests.support.profiles import covering, few

SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


# -- by hand ----------------------------------------------------------------------------------------------------------


def train_by_hand(
    task: forge.TaskModule, dtype: str, data: list[Any], epochs: int = 2, device: str = "cpu", **levers: Any
) -> list[float]:
    """The scale after every update."""
    task.to(device)
    configured = task.configure_optimizers()
    optimizer, schedule = configured if isinstance(configured, tuple) else (configured, None)
    levers |= {"dtype": SHORT[dtype], "scale": HIGH["init_scale"], "growth_interval": HIGH["growth_interval"]}
    by_hand = reference.Levers(schedule=schedule and (lambda _: schedule), **levers)
    data = [(x.to(device), y.to(device)) for x, y in data]
    return reference.train_with_levers(task, loss_of, optimizer, data, epochs, by_hand, 0).scales


def loss_of(task: Any, batch: Any) -> Tensor:
    return task.training_step(batch)["loss"]


def train_gan_by_hand(gan: Any, dtype: str, data: list[Any], epochs: int) -> list[float]:
    """Two optimizers, one scaler: stepped each for itself, updated once."""
    torch.manual_seed(0)
    gan.train()
    optimizers = gan.configure_optimizers()
    scaler = GradScaler("cpu", **HIGH, enabled=dtype == "fp16")
    scales: list[float] = []
    for batch in data * epochs:
        for name, optimizer in optimizers.items():
            if not gan.takes_turn(name, len(scales)):
                continue
            for other in optimizers:
                getattr(gan, other).requires_grad_(other == name)
            with torch.autocast("cpu", SHORT[dtype]):
                loss = gan.training_step(batch, name)["loss"]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


class WithSchedule(TinyTask):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@few
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=6),
    window=st.integers(1, 3),
    clip=st.sampled_from([None, 0.3]),
    kind=st.sampled_from([TinyTask, WithSchedule]),
)
def test_training_equals_a_hand_written_loop_bit_for_bit(
    dtype: str, sizes: list[int], window: int, clip: float | None, kind: type[TinyTask]
) -> None:
    ours, theirs, data = kind(), kind(), tiny_batches(sizes)
    scales = trained(ours, made(dtype), Accumulate(window), *([] if clip is None else [Clip(clip)]), train=data)
    assert scales == train_by_hand(theirs, dtype, data, window=window, clip_norm=clip)
    assert_same(ours, theirs)


class Turns(TinyGAN):
    def takes_turn(self, name: str, update: int) -> bool:
        return name == "discriminator" or update % 2 == 0


class LoudDiscriminator(TinyGAN):
    """Its gradients overflow at scales at which the generator's do not."""

    def training_step(self, batch: Any, name: str) -> Any:
        loss = super().training_step(batch, name)["loss"]
        return {"loss": loss * 8 if name == "discriminator" else loss}


@pytest.mark.parametrize(("dtype", "kind"), covering(["fp16", "bf16"], [LoudDiscriminator, TinyGAN, Turns]))
def test_several_optimizers_share_one_scaler_as_by_hand(dtype: str, kind: Any) -> None:
    """Only the optimizer whose gradients overflow is skipped."""
    ours, theirs = kind(), kind()
    scales = trained(ours, made(dtype), max_epochs=3)
    assert scales == (train_gan_by_hand(theirs, dtype, tiny_batches(), epochs=3))
    assert_same(ours, theirs)


# -- skipped updates --------------------------------------------------------------------------------------------------


class Skip(forge.Plugin):
    """Somebody who skips an update for reasons of their own."""

    def __init__(self, updates: Iterable[int], hook: str):
        super().__init__()
        self.updates = frozenset(updates)
        for other in {"forge_finalize_grads", "forge_inspect_grads", "forge_edit_grads"} - {hook}:
            setattr(self, other, None)

    @forge.hookimpl
    def forge_finalize_grads(self, step: forge.Step) -> None:
        if step.index in self.updates:
            step.skip_update("asked to")

    forge_inspect_grads = forge_edit_grads = forge_finalize_grads


@pytest.mark.parametrize("hook", ["forge_finalize_grads", "forge_inspect_grads", "forge_edit_grads"])
@pytest.mark.parametrize("amp_first", [True, False])
def test_another_plugins_skip_leaves_the_scaler_right(hook: str, amp_first: bool) -> None:
    ours, theirs, skipped = TinyTask(), TinyTask(), (0, 5, 6)
    amp, skip = made("fp16"), Skip(skipped, hook)
    scales = Scales(amp)
    fit_tiny([amp, skip, scales] if amp_first else [skip, amp, scales], task=ours)
    assert scales.seen == train_by_hand(theirs, "fp16", tiny_batches(), left_out=skipped)
    assert_same(ours, theirs)


def test_an_overflow_is_a_skipped_update_for_everybody() -> None:
    edited: list[int] = []
    updated: list[bool] = []

    class Watch(forge.Plugin):
        @forge.hookimpl
        def forge_edit_grads(self, step: forge.Step) -> None:
            assert all(bool(p.grad.isfinite().all()) for p in step.parameters() if p.grad is not None)
            edited.append(step.index)

        @forge.hookimpl
        def forge_step_end(self, step: forge.Step) -> None:
            updated.append(step.updated)

    scales = trained(TinyTask(), made("fp16"), Watch())
    overflowed = [after < before for before, after in zip([2.0**20, *scales], scales, strict=False)]
    assert updated == [not it for it in overflowed]
    assert edited == [index for index, it in enumerate(updated) if it]


def test_scale_and_skips_are_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logged: list[tuple[int, float, float]] = []

    class Sink(forge.Plugin):
        @forge.hookimpl
        def forge_log(self, update: int, metrics: dict[str, Any]) -> None:
            if "amp/scale" in metrics:
                logged.append((update, metrics["amp/scale"], metrics["amp/skipped"]))

    scales = trained(TinyTask(), made("fp16"), Sink(), log_every=3)
    downs = [after < before for before, after in zip([2.0**20, *scales], scales, strict=False)]
    assert logged == [(update, scales[update - 1], sum(downs[:update])) for update in (3, 5, 6, 9, 10)]
    assert "skip_update asked for by amp: gradients overflow with the loss scaled by 1048576, which is" in caplog.text
    assert f"amp: {sum(downs)} updates skipped in this run; the loss scale is {scales[-1]:.10g} now." in caplog.text


class BadGradient(TinyTask):
    """A finite loss with a NaN in its gradient, at any scale."""

    def training_step(self, batch: Any) -> Any:
        return {"loss": super().training_step(batch)["loss"] + (self.net(batch[0]) * 0).abs().sqrt().sum()}


def test_a_scale_below_one_warns_once_and_zero_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    fit_tiny([AMP("fp16", init_scale=4.0)], task=BadGradient())
    told = [record.getMessage() for record in caplog.records if "has fallen" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("amp: the loss scale has fallen to 0.5 at update 2. Gradients overflow at any loss scale")
    assert "amp.dtype=bf16" in told[0]
    with pytest.raises(NonFiniteError, match="Update 1: the loss scale has fallen to 0"):
        fit_tiny([AMP("fp16", init_scale=2.0**-148)], task=BadGradient())


# -- forward and evaluation -------------------------------------------------------------------------------------------


class Typed(TinyTask):
    """Writes down what its first layer gives, by what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.dtype] = {}

    def look(self, name: str, x: Tensor) -> None:
        self.seen[name] = self.net.get_submodule("0")(x).dtype

    def training_step(self, batch: Any) -> Any:
        self.look("train", batch[0])
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.look("val", batch[0])
        return super().training_step(batch)

    def test_step(self, batch: Any) -> Any:
        self.look("test", batch[0])
        return super().training_step(batch)

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_stage_is_in_the_short_type_but_weights_long(dtype: str) -> None:
    task = Typed()
    trainer = forge.Trainer(plugins=[AMP(dtype)], max_epochs=1, run_dir=False)
    trainer.fit(task, tiny_batches(), tiny_batches())
    trainer.test(task, tiny_batches())
    assert task.seen == dict.fromkeys(("train", "val", "test"), SHORT[dtype])
    assert [output.dtype for output in trainer.predict(task, tiny_batches())] == [SHORT[dtype]] * 5
    assert {p.dtype for p in task.parameters()} == {torch.float32}


def test_autocast_ends_with_the_forward() -> None:
    seen: dict[str, bool] = {}

    class Watch(forge.Plugin):
        @forge.hookimpl(wrapper=True)
        def forge_backward(self) -> Any:
            seen["backward"] = torch.is_autocast_enabled("cpu")
            return (yield)

        @forge.hookimpl
        def forge_step_end(self) -> None:
            seen["step_end"] = torch.is_autocast_enabled("cpu")

    fit_tiny([Watch(), AMP("bf16")])
    assert seen == {"backward": False, "step_end": False}


# -- state ------------------------------------------------------------------------------------------------------------


def test_options_that_changed_hold_from_the_resume_on(tmp_path: Path) -> None:
    saving: Any = lambda: Checkpoint(every="1 updates", background=False)  # noqa: E731
    first, second = AMP("fp16", init_scale=8.0, growth_interval=100), AMP("fp16", init_scale=1.0, growth_interval=4)
    trained(TinyTask(), first, saving(), max_updates=3, run_dir=tmp_path)
    assert trained(TinyTask(), second, saving(), max_updates=5, run_dir=tmp_path, resume="auto") == [16.0, 16.0]


@pytest.mark.parametrize(("then", "now"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_auto_says_when_another_device_takes_another_type(
    then: str, now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forge_plugins.amp.best_dtype", lambda device: then)
    stack: Any = lambda: [AMP(), Checkpoint(every="1 updates", background=False)]  # noqa: E731
    fit_tiny(stack(), max_updates=3, run_dir=tmp_path)
    monkeypatch.setattr("forge_plugins.amp.best_dtype", lambda device: now)
    fit_tiny(stack(), max_updates=6, run_dir=tmp_path, resume="auto")
    assert f"amp: the run was in {then}; auto is {now} on this device." in caplog.text


# -- with guard and anomaly -------------------------------------------------------------------------------------------


def with_nan(*bad: int, count: int = 6) -> list[Any]:
    data = tiny_batches([8] * count)
    for index in bad:
        data[index][0][3, 2] = math.nan
    return data


@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
def test_an_overflow_is_no_business_of_guard_and_anomaly(policy: str, tmp_path: Path) -> None:
    plain, watched, anomaly = TinyTask(), TinyTask(), Anomaly()
    expected = trained(plain, made("fp16"))
    assert 2.0**19 in expected
    assert trained(watched, made("fp16"), Guard(policy), anomaly, run_dir=tmp_path) == expected
    assert_same(watched, plain)
    assert anomaly.findings == []


@pytest.mark.parametrize("amp_first", [True, False])
def test_guard_skips_a_bad_window_and_leaves_no_trace_of_it(amp_first: bool) -> None:
    skipped, expected = TinyTask(dropout=0.0), TinyTask(dropout=0.0)
    stack = [AMP("fp16", init_scale=128.0), Guard("skip")]
    fit_tiny(stack if amp_first else stack[::-1], task=skipped, train=with_nan(3), max_epochs=1)
    data = [batch for index, batch in enumerate(with_nan()) if index != 3]
    fit_tiny([AMP("fp16", init_scale=128.0)], task=expected, train=data, max_epochs=1)
    assert_same(skipped, expected)  # a scale of 64 instead of 128 moves no bit


@pytest.mark.parametrize("amp_first", [True, False])
def test_a_rewind_takes_the_scaler_back_too(amp_first: bool, tmp_path: Path) -> None:
    rewound, expected, amp = TinyTask(), TinyTask(), made("fp16")
    scales = Scales(amp)
    stack = [amp, Guard("rewind"), Checkpoint(every="2 updates", background=False)]
    stack = [*(stack if amp_first else stack[::-1]), scales]
    fit_tiny(stack, task=rewound, train=with_nan(5, count=8), max_epochs=1, run_dir=tmp_path)
    data = [batch for index, batch in enumerate(with_nan(count=8)) if index != 5]
    straight = trained(expected, made("fp16"), train=data, max_epochs=1)
    assert_same(rewound, expected)
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
