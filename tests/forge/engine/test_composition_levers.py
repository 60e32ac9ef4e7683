"""The composition law for every lever: a stack is refused by name, or equals the hand-written loop and resumes exactly.

Bits are compared everywhere. Under autocast a compiled graph rounds in other places than torch does without one, so
there the hand-written loop is compiled too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import forge
from forge import registry
from forge.checkpoint import StoredCheckpoint
from forge.errors import StackError
from tests.conftest import PROFILE
from tests.forge.engine.test_composition import Net, batches, loss_of, same_state, warmup_cosine
from tests.support import reference
from tests.support.profiles import some

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "accumulate": [{"window": 2}, {"window": 3}],
    "amp": [{"dtype": "bf16"}, {"dtype": "fp16", "growth_interval": 3}],
    "clip": [{"max_norm": 0.5}],
    "early_stop": [{"patience": 1, "min_delta": 1e9}],
    "ema": [{"decay": 0.9}],
    "fused_optimizer": [{}],
    "limit": [{"train": 1.0, "val": 9}],
    "freeze": [{"modules": ["net.0", "net.1"], "thaw": "3 updates"}, {"modules": ["net.0", "net.1"]}],
    "qat": [{}],
    "remat": [{"modules": ["net.1", "net.3"]}, {"modules": "net"}],
    "sam": [{"rho": 0.1}],
    "schedule": [{"kind": "cosine", "warmup": 2}],
    "swa": [{"start": 0, "every": "2 updates"}],
}
"""Levers, with the options that they are drawn with."""
OBSERVERS: dict[str, dict[str, Any]] = {
    "anomaly": {},
    "backends": {},
    "channels_last": {},
    "csv": {},
    "cuda_graph": {},
    "fp8": {},
    "first_look": {},
    "duration": {"max_time": "1 h", "min_updates": 2},
    "spans": {"hooks": True, "rates": True},
    "jsonl": {},
    "kernels": {},
    "monitor": {"every": "2 updates", "histograms": True},
    "rehearse": {},
    "system": {},
    "prefetch": {},
    "profiler": {"wait": 1, "warmup": 1, "active": 1},
    "progress": {},
    "tensorboard": {},
    "validate_first": {},
    "guard": {},
}
"""What only looks, guard among them: with finite numbers it changes nothing; nor do backends, cuda_graph,
fp8 and kernels off CUDA, and channels_last without images."""
INSTALLED = registry.installed("plugin").keys()
EPOCHS, SEED, MOST_UPDATES = 3, 7, 30

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}

Stack = list[tuple[str, dict[str, Any]]]


@st.composite
def stacks(draw: st.DrawFn, always: tuple[str, ...] = ()) -> Stack:
    """Levers and observers in any order, the levers with drawn options."""
    levers = draw(st.sets(st.sampled_from(sorted(OPTIONS.keys() & INSTALLED)), max_size=6)) | set(always)
    watching = draw(st.sets(st.sampled_from(sorted(OBSERVERS.keys() & INSTALLED)), max_size=3))
    chosen = [(name, draw(st.sampled_from(OPTIONS[name]))) for name in sorted(levers)]
    return draw(st.permutations([*chosen, *((name, OBSERVERS[name]) for name in sorted(watching))]))


def made(stack: Stack) -> list[forge.Plugin]:
    return [registry.load("plugin", name)(**options) for name, options in stack]


def clashes(stack: Stack) -> list[tuple[str, str]]:
    """Pairs of plugins in a stack that cannot stand together."""
    there = dict(stack)
    scaled = there.get("amp", {}).get("dtype") == "fp16"
    pairs = [("ema", "swa"), ("cuda_graph", "sam"), ("fp8", "qat")]
    pairs += [("amp", "sam"), ("amp", "fp8")] if scaled else []
    return [pair for pair in pairs if set(pair) <= there.keys()]


def trained(stack: Stack, data: Any, folder: Path, task: Net, **options: Any) -> forge.FitResult:
    plugins = [*made(stack), registry.load("plugin", "checkpoint")(every="1 updates", keep=MOST_UPDATES)]
    trainer = forge.Trainer(max_epochs=EPOCHS, seed=SEED, plugins=plugins, run_dir=folder, log_every=2, **options)
    return trainer.fit(task, data, batches([4, 3], seed=1))


def by_hand(stack: Stack, net: Net, data: Any, loss_of: Callable[..., Any] = loss_of) -> reference.Outcome:
    there = dict(stack)
    if "qat" in there:
        reference.round_layers(net)
    window = there.get("accumulate", {}).get("window", 1)
    total = EPOCHS * math.ceil(len(data) / window)
    schedule: Callable[[Any], Any] = lambda optimizer: warmup_cosine(optimizer, 2, total)  # noqa: E731
    levers = reference.Levers(
        window=window,
        clip_norm=0.5 if "clip" in there else None,
        dtype=DTYPES[there.get("amp", {}).get("dtype")],
        growth_interval=3,
        rho=0.1 if "sam" in there else None,
        decay=0.9 if "ema" in there else None,
        swa_every=2 if "swa" in there else None,
        frozen=list(net.net)[:2] if "freeze" in there else (),
        thaw_at=3 if "thaw" in there.get("freeze", {}) else None,
        schedule=schedule if "schedule" in there else None,
    )
    epochs = 2 if "early_stop" in there else EPOCHS
    optimizer = net.configure_optimizers()
    if "fused_optimizer" in there and isinstance(optimizer, torch.optim.AdamW):  # SGD with momentum is left alone
        for group in optimizer.param_groups:
            group["fused"] = True
    return reference.train_with_levers(net, loss_of, optimizer, data, epochs, levers, SEED)


def validated(weights: dict[str, torch.Tensor], stack: Stack, optimizer: str, trained: Net) -> float:
    """The loss over the validation data, of the weights that were exported, under the same autocast and rounding."""
    net, dtype = new(optimizer), DTYPES[dict(stack).get("amp", {}).get("dtype")]
    if "qat" in dict(stack):
        reference.round_layers(net)
        for name, buffer in trained.named_buffers():
            net.get_buffer(name).copy_(buffer)
    net.load_state_dict(weights)
    net.eval()
    with torch.inference_mode(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        losses = [(float(loss_of(net, batch)), len(batch[0])) for batch in batches([4, 3], seed=1)]
    return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)


def new(optimizer: str) -> Net:
    torch.manual_seed(1)
    return Net(optimizer)


@pytest.mark.parametrize("optimizer", some(["adam", "sgd"]))
@given(stack=stacks(), sizes=st.lists(st.integers(2, 5), min_size=2, max_size=6), cut=st.integers(1, MOST_UPDATES))
@settings(max_examples=500 if PROFILE == "full" else 6)
def test_a_stack_is_refused_or_equals_the_loop_and_resumes(
    optimizer: str, stack: Stack, sizes: list[int], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, folder = batches(sizes), tmp_path_factory.mktemp("runs")
    if clashes(stack):
        with pytest.raises(StackError) as refused:
            trained(stack, data, folder / "refused", new(optimizer))
        text = str(refused.value)
        assert any(repr(one) in text and repr(other) in text for one, other in clashes(stack))
        return
    ours, theirs = new(optimizer), new(optimizer)
    keys = list(ours.state_dict())
    flags = [p.requires_grad for p in ours.parameters()]
    result = trained(stack, data, folder / "straight", ours)
    expected = by_hand(stack, theirs, data)

    assert same_state(ours, theirs)
    assert list(ours.state_dict()) == keys
    assert [p.requires_grad for p in ours.parameters()] == flags
    exported = load_file(folder / "straight" / "weights.safetensors")
    if expected.average is None:
        assert all(torch.equal(exported[name], value) for name, value in ours.state_dict().items())
    else:
        names = [name for name, _ in ours.named_parameters()]
        assert all(torch.equal(exported[n], a) for n, a in zip(names, expected.average, strict=True))
    assert result.metrics["val/loss"] == pytest.approx(validated(exported, stack, optimizer, theirs), rel=1e-6)
    if dict(stack).get("amp", {}).get("dtype") == "fp16":
        assert result.metrics["amp/skipped"] == expected.skipped

    at = 1 + cut % result.updates
    saved = folder / "straight" / "checkpoints" / f"update-{at:08d}"
    last = StoredCheckpoint(folder / "straight" / "checkpoints" / f"update-{result.updates:08d}").weights()
    assert all(torch.equal(last[name], value) for name, value in ours.state_dict().items())
    again = new(optimizer)
    trained(stack, data, folder / "resumed", again, resume=saved)
    assert same_state(again, ours)
    resumed = load_file(folder / "resumed" / "weights.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in exported.items())


MANY: Stack = [(name, OPTIONS[name][0]) for name in ("amp", "clip", "accumulate", "ema", "remat", "schedule")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocks", [pytest.param(None, id="whole"), pytest.param(["net"], id="blocks", marks=pytest.mark.slow)]
)
@given(stack=stacks(), place=st.integers(0, 9), optimizer=st.sampled_from(["sgd", "adam"]), cut=st.integers(1, 99))
@example(stack=MANY, place=2, optimizer="adam", cut=3)
@settings(max_examples=25, phases=list(Phase) if PROFILE == "full" else [Phase.explicit])  # seconds each
def test_a_compiled_stack_equals_the_loop_and_resumes(
    blocks: Any, stack: Stack, place: int, optimizer: str, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assume(not clashes(stack) and "qat" not in dict(stack))  # tests/forge_ship/test_qat.py compares it compiled
    torch._dynamo.reset()
    data, folder = batches([4] * 4), tmp_path_factory.mktemp("runs")
    ours, theirs = new(optimizer), new(optimizer)
    keys, flags = list(ours.state_dict()), [p.requires_grad for p in ours.parameters()]
    compiled = list(stack)
    compiled.insert(place, ("compile", {"backend": "aot_eager", **({"blocks": blocks} if blocks else {})}))
    result = trained(compiled, data, folder / "run", ours)
    assert list(ours.state_dict()) == keys
    assert [p.requires_grad for p in ours.parameters()] == flags
    assert result.metrics["compile/graphs"] > 0
    if "amp" not in dict(stack):
        by_hand(stack, theirs, data)
    elif blocks:
        theirs.net.compile(backend="aot_eager", dynamic=False)
        by_hand(stack, theirs, data)
    else:
        by_hand(stack, theirs, data, torch.compile(loss_of, backend="aot_eager", dynamic=False))
    assert same_state(ours, theirs)

    again, at = new(optimizer), 1 + cut % result.updates
    trained(compiled, data, folder / "resumed", again, resume=folder / "run" / "checkpoints" / f"update-{at:08d}")
    assert same_state(again, ours)


def test_every_built_in_plugin_is_in_these_laws() -> None:
    ours = {n for n, entry in registry.installed("plugin").items() if entry.value.startswith("forge_")}
    strategies = {
        "context_parallel",
        "ddp",
        "expert_parallel",
        "fsdp",
        "pipeline",
        "tensor_parallel",
        "torchft",
        "zero",
    }  # tests/forge_plugins/test_ddp.py and its neighbours compare these
    services = {"mlflow", "wandb"}  # observers that talk to others: their own tests hold them to the same
    known = {*OPTIONS, *OBSERVERS, "checkpoint", "compile"} | strategies | services
    assert ours <= known
    assert all(registry.to_install("plugin", name) for name in known - ours)
