"""context_parallel: ranks that hold a slice of every sequence train what one process trains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import forge
from forge.distributed.positions import set_slice
from forge.errors import DataError, RecipeError, StackError, TaskError
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.context_parallel.calls import SequenceCalls
from forge_cluster.context_parallel.slices import Slicing
from forge_plugins import AMP, DDP, EMA, SAM, Accumulate, Clip, Compile, CudaGraph, Freeze, Guard, Remat, Schedule
from forge_speed.kernels import Kernels
from tests.support import context_kit as kit
from tests.support.fitted import assert_rounded
from tests.support.fsdp_kit import close
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

# ---------------------------------------------------------------------------------------------------------------------
# Against one process


def kinds() -> dict[str, Any]:
    return {
        "levers": lambda: (
            kit.Tokens(),
            [Accumulate(3), Clip(0.5), EMA(0.9), Remat("Layer"), Schedule("linear"), Guard("skip")],
        ),
        "both sides": lambda: (kit.Full(), [Accumulate(2), Remat("Imported")]),
        "counted items": lambda: (kit.Counting(), [Accumulate(3), Clip(0.5)]),
        "padded": lambda: (kit.Padded(), [Accumulate(2), Guard()]),
        "frozen": lambda: (kit.Tokens(), [Freeze(["blocks.0", "places"], thaw="1 epoch")]),
        "sam": lambda: (kit.Tokens(), [SAM(0.05), Accumulate(2), Clip(0.5)]),
        "stranger": lambda: (kit.Stranger(), [Clip(0.5)]),
        "compiled": lambda: (kit.Tokens(), [Compile(backend="aot_eager", blocks="Layer"), Accumulate(2)]),
        "compiled whole": lambda: (kit.Counting(), [Compile(backend="aot_eager"), Remat("Layer")]),
    }


COUNTED = ("counted items", "compiled whole")


def run(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Divided batches need num_items where some targets do not count, as with ddp; divided sequences do not."""
    task, plugins = kinds()[kind]()
    data = {"data": kit.token_batches(ignored="size" not in options or kind in COUNTED)}
    data["val"] = kit.token_batches(seed=1, ignored=kind in COUNTED)
    return kit.fit_tokens(task, plugins, {**options, **({"positions": "arange"} if kind == "stranger" else {})}, **data)


QUICK = [(2, "both sides", {})]
SLOW = [
    (4, "counted items", {"size": 2, "balance": False}),
    *((count, kind, {}) for count in (2, 4) for kind in kinds()),
    *((8, kind, {}) for kind in ("levers", "both sides", "counted items", "padded")),
    (8, "levers", {"balance": False}),
    (8, "levers", {"size": 4}),
    (8, "counted items", {"size": 2}),
]


@pytest.mark.parametrize(
    ("count", "kind", "options"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in QUICK)],
)
def test_slices_train_what_one_process_trains(count: int, kind: str, options: dict[str, Any]) -> None:
    alone, together = run(kind, options), ranks(count)(run, kind, options)
    for rank in together:
        close(rank, alone, 1e-11)
        assert all(torch.equal(value, rank["weights"][key]) for key, value in together[0]["weights"].items())


class Single(kit.Tokens):
    """In float32."""

    def __init__(self) -> None:
        super().__init__()
        self.float()


def in_bf16(amp: bool) -> dict[str, Any]:
    return kit.fit_tokens(Single(), [AMP("bf16")] if amp else [], {})["weights"]


@pytest.mark.slow
def test_amp_rounds_within_its_precision() -> None:
    plain, alone = in_bf16(False), in_bf16(True)
    assert_rounded(plain, alone, ranks(2)(in_bf16, True))


def recipe_tasks(kind: str) -> dict[str, Any]:
    from forge_recipes.gpt import GPT
    from forge_recipes.shakespeare import CharGPT

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "context": 32}
    task = GPT(**sizes, vocabulary=11) if kind == "gpt" else CharGPT(**sizes, dropout=0.0, sample=0)
    return kit.fit_tokens(task.double(), [Accumulate(2)], {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(["gpt", "shakespeare"]))
def test_the_models_of_recipes_know_their_positions(kind: str) -> None:
    alone = recipe_tasks(kind)
    for rank in ranks(2)(recipe_tasks, kind):
        close(rank, alone, 1e-11)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, random numbers, checks


def evaluated(folder: str) -> dict[str, Any]:
    several = [DDP(), ContextParallel()] if "RANK" in os.environ else []
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=folder, plugins=[EMA(0.5), *several])
    trainer.fit(kit.Counting(), kit.token_batches(), kit.token_batches(seed=1))
    fresh = kit.Counting()
    found = {
        "val": trainer.validate(fresh, kit.token_batches(seed=1)),
        "test": trainer.test(fresh, kit.token_batches(seed=2)),
    }
    return {**found, "predicted": torch.cat(trainer.predict(fresh, kit.token_batches(seed=1)))}


@pytest.mark.slow
def test_evaluations_and_exports_are_those_of_one_process(tmp_path: Path) -> None:
    alone = evaluated(str(tmp_path / "one"))
    for rank in ranks(2)(evaluated, str(tmp_path / "two")):
        for stage in ("val", "test"):
            assert rank[stage] == pytest.approx(alone[stage], rel=1e-11)
        torch.testing.assert_close(rank["predicted"], alone["predicted"], rtol=1e-11, atol=1e-11)
    ours, theirs = (kit.Counting.from_checkpoint(tmp_path / name).state_dict() for name in ("two", "one"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-11)


def drawn() -> tuple[float, list[int]]:
    seen: list[Any] = []

    class Seen(kit.Tokens):
        def training_step(self, batch: Any) -> Any:
            seen.append((torch.rand(()).item(), forge.positions(batch[0]).tolist()))
            return super().training_step(batch)

    kit.fit_tokens(Seen(dropout=0.5), [], {}, max_epochs=1, val=None)
    return seen[-1]


@pytest.mark.slow
def test_each_rank_draws_its_own_numbers_for_its_own_positions() -> None:
    (first, head), (second, tail) = ranks(2)(drawn)
    assert first != second
    assert head == [0, 1, 2, 3, 12, 13, 14, 15]
    assert tail == list(range(4, 12))
    assert forge.positions(torch.zeros(2, 3)).tolist() == [0, 1, 2]


def undone() -> bool:
    names = ("scaled_dot_product_attention", "cross_entropy", "nll_loss")
    before = [getattr(functional, name) for name in names]
    kit.fit_tokens(kit.Full(), [], {}, max_epochs=1)
    assert forge.positions(torch.zeros(1, 5)).tolist() == [0, 1, 2, 3, 4]
    return [getattr(functional, name) for name in names] == before and vars(kit)[names[0]] is before[0]


@pytest.fixture(autouse=True)
def whole_sequences_again() -> Iterator[None]:
    yield
    set_slice(None)


def watched_calls(positions: bool = False) -> tuple[SequenceCalls, list[bool]]:
    """Return calls over a ring of one slice, and a list that tells of each forward pass if the mode saw it."""
    ring: Any = SimpleNamespace(attend=lambda query, *_: query, balance=False)
    calls, seen = SequenceCalls(ring, True, positions), []
    calls.enter(torch.arange(4))
    return calls, seen


def passes(calls: SequenceCalls, seen: list[bool], count: int, *functions: Any) -> None:
    x = torch.zeros(1, 1, 4, 2)
    for _ in range(count):
        with calls.seen():
            seen.append(bool(torch._C._len_torch_function_stack()))
            for function in functions:
                function(x, x, x)


def test_another_name_that_comes_later_is_refused() -> None:
    calls, seen = watched_calls()
    passes(calls, seen, 6, calls.attention)
    with pytest.raises(TaskError, match="by a name that it did not call before"):
        passes(calls, seen, 4, calls.attention, functional.scaled_dot_product_attention)


def test_torchs_functions_are_put_back() -> None:
    assert ranks(2)(undone) == [True, True]


# ---------------------------------------------------------------------------------------------------------------------
# Refused


def broken(kind: str, options: dict[str, Any]) -> None:
    kit.fit_tokens(getattr(kit, kind)(), [], options)


DIFFERS = "does not compute the same on divided sequences"


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    some(
        [
            ("Stranger", {"balance": False}, "Use forge.positions(x) in place of torch.arange(length)"),
            ("Shifting", {}, "Shift targets in the data set"),
            ("Pooling", {}, DIFFERS),
            ("Drawing", {}, "set context_parallel.check=false"),
            ("Masking", {}, "passes a mask to scaled_dot_product_attention"),
            ("Dropping", {}, "drops attention weights (dropout_p=0.1)"),
            ("Summarising", {}, "attention of 9 queries over 9 keys, where the rank's slice of the sequence has 8"),
            ("ByHand", {}, "does not call torch.nn.functional.scaled_dot_product_attention"),
            ("Stranger", {}, DIFFERS),
            ("Shifting", {"balance": False}, DIFFERS),
        ],
        quick=3,
    ),
)
def test_a_task_that_mixes_positions_is_refused(kind: str, options: dict[str, Any], said: str) -> None:
    for error in ranks(2).errors(broken, kind, options):
        assert error.startswith((f"{TaskError.__name__}: context_parallel", "PeerFailed"))
        assert said in error


def validated_stranger() -> None:
    trainer = forge.Trainer(seed=0, device="cpu", run_dir=False, plugins=[DDP(), ContextParallel()])
    trainer.validate(kit.Stranger(), kit.token_batches())


@pytest.mark.slow
def test_a_validation_alone_is_compared_too() -> None:
    for error in ranks(2).errors(validated_stranger):
        assert DIFFERS in error
        assert "(val: in loss: " in error


def of_length(length: int, options: dict[str, Any]) -> None:
    data = kit.token_batches(length=length)
    kit.fit_tokens(kit.Tokens(), [], options, data=data, val=None)


@pytest.mark.parametrize(
    ("length", "options", "said"),
    some(
        [
            (18, {}, "2 ranks cannot divide a sequence of 18 positions evenly in two halves each, a head and a tail"),
            (18, {}, "or set context_parallel.balance=false"),
            (17, {"balance": False}, "Use sequences of a multiple of 2, or fewer ranks (context_parallel.size)."),
            (
                16,
                {"entries": ["tokens"]},
                "the batch has no tensor 'tokens' with a dimension 1; it has 0 (4, 16) int64",
            ),
            (
                16,
                {"dim": 2},
                "finds no tokens in the batch, which has 0 (4, 16) int64, 1 (4, 16) int64. Name the tensors",
            ),
            (16, {"size": 3}, "2 processes cannot be arranged as context 3"),
        ],
        quick=2,
    ),
)
def test_sequences_that_cannot_be_divided_are_refused(length: int, options: dict[str, Any], said: str) -> None:
    for error in ranks(2).errors(of_length, length, options):
        assert said in error


@pytest.mark.parametrize("plugin", [Kernels(), CudaGraph()], ids=lambda plugin: plugin.name)
def test_a_stack_that_makes_no_sense_is_refused(plugin: Any) -> None:
    with pytest.raises(StackError, match="context_parallel"):
        forge.Trainer(max_epochs=1, device="cpu", run_dir=False, plugins=[DDP(), ContextParallel(), plugin]).fit(
            kit.Tokens(), kit.token_batches()
        )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": 1}, "context_parallel.size is 1"),
        ({"dim": -1}, "context_parallel.dim is -1"),
    ],
)
def test_a_wrong_option_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        ContextParallel(**values)


@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_slices_are_a_partition_of_the_batch(size: int, each: int, balance: bool, named: bool) -> None:
    length = size * each * (2 if balance else 1)
    text = torch.arange(3 * length).view(3, length)
    batch = {"ids": text, "more": [text.double()[..., None].expand(3, length, 2), "title"], "label": torch.zeros(3)}
    parts, places = [], []
    for rank in range(size):
        slicing = Slicing(("ids", "more.0") if named else (), 1, rank, size, balance)
        assert slicing.length(batch) == length
        parts.append(slicing.cut(batch, length))
        places.append(slicing.positions(length, torch.device("cpu")))
    order = torch.cat(places).argsort()
    assert torch.equal(torch.cat([part["ids"] for part in parts], 1)[:, order], text)
    assert torch.equal(torch.cat([part["more"][0] for part in parts], 1)[:, order], batch["more"][0])
    assert all(part["label"] is batch["label"] for part in parts)
    assert all(part["more"][1] == "title" for part in parts)


def test_entries_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="different lengths along dimension 1"):
        Slicing(("0", "1"), 1, 0, 2, False).length((torch.zeros(2, 4), torch.zeros(2, 6)))


def test_one_process_alone_trains_with_it_too() -> None:
    plugins = [DDP(), ContextParallel(), Clip(0.5)]
    ours = kit.fit_tokens(kit.Stranger(), plugins, {})
    close(ours, kit.fit_tokens(kit.Stranger(), [Clip(0.5)], {}))
