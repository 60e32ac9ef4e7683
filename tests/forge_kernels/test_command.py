"""`forge kernels`: the list, one kernel's contract, and the bench."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import kernels
from forge import cli, registry
from forge_kernels import bench, contract
from forge_kernels.contract import Case, Cost, Kernel
from forge_kernels.eager import eager
from tests.support import toy_kernels
from tests.support.toy_kernels import entries


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    found = entries("toy", "toy_bare", "toy_module", broken="a_package_that_nobody_has:KERNEL")
    others = registry.installed
    monkeypatch.setattr(registry, "installed", lambda kind: found if kind == "kernel" else others(kind))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "INTERPRETED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.main(["kernels", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.out + " ".join(captured.err.split())


def test_the_list_says_what_each_computes_takes_and_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {line.split()[0]: line for line in said(capsys).splitlines() if line.strip()}
    assert "half of x" in lines["toy"]
    assert "fp32 bf16" in lines["toy"]
    assert "relu" in lines["toy"]
    assert "Linear" in lines["toy_module"]
    assert " - " in lines["toy_bare"]


def test_a_broken_package_is_listed_with_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a_package_that_nobody_has" in said(capsys)


def test_one_kernel_is_shown_with_its_promises_and_cases(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "toy")
    assert "error in bfloat16" in text
    assert "at most 0.01 of the norm" in text
    assert "torch.nn.functional.relu" in text
    assert "toy_kernels.py:" in text
    (line,) = [line for line in text.splitlines() if line.startswith("4×8")]
    assert "0.000256 MB" in line  # 32 entries of 2 bytes, moved 4 times


def test_one_that_replaces_nothing_says_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing by itself: call it in your task" in said(capsys, "toy_bare")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tooy"], "No kernel is called 'tooy'. Did you mean 'toy'?"),
        (["toy", "toy_bare"], "shows one kernel at a time"),
        (["toy", "--json"], "--json is for measuring: forge kernels bench toy --json"),
        (["bench", "toy", "--dtype", "bf16"], "--dtype has 'bf16'"),
        (["bench", "toy", "--against", "triton"], "--against has 'triton'"),
        (["bench", "toy", "--case", "9×9"], "--case: no case has '9×9' in its name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in said(capsys, *words, code=2)


def test_the_bench_refuses_to_measure_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = said(capsys, "bench", "toy", code=2)
    assert "needs a CUDA device, and none is available" in text
    assert "--interpret" in text


@pytest.mark.usefixtures("on_the_cpu_too")
def test_the_bench_has_a_row_for_every_case_dtype_and_contender(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "toy", "--quick", "--json", "--dtype", "float32,bfloat16", "--against", "eager,liger"]
    machine, *rows = [json.loads(line) for line in said(capsys, *words).splitlines()]
    assert machine["machine"]["torch"] == torch.__version__
    assert machine["machine"]["copy_bytes_per_s"] > 0
    found = {(row["case"], row["dtype"], row["contender"]) for row in rows}
    assert found == {(c, d, w) for c in ("4×8", "6×8") for d in ("float32", "bfloat16") for w in ("forge", "eager")}
    assert all(row["ms_low"] <= row["ms"] <= row["ms_high"] and row["roofline"] > 0 for row in rows)
    assert all(row["error"] <= 1e-2 for row in rows)
    assert {row["tolerance"] for row in rows if row["contender"] == "forge"} == {1e-6, 1e-2}


@pytest.mark.usefixtures("on_the_cpu_too")
def test_the_bench_of_everything_passes_over_a_broken_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", "bench", "--quick", "--json", "--case", "4×8", "--against", "none"]) == 0
    captured = capsys.readouterr()
    assert "a_package_that_nobody_has" in captured.err
    rows = [json.loads(line) for line in captured.out.splitlines()[1:]]
    assert [row["kernel"] for row in rows] == ["toy", "toy_bare", "toy_module"]


@pytest.mark.usefixtures("on_the_cpu_too")
def test_the_bench_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "bench", "toy", "--quick", "--case", "6×8", "--against", "none")
    assert "TB/s copied" in text
    (line,) = [line for line in text.splitlines() if line.startswith("toy")]
    assert line.split()[:4] == ["toy", "6×8", "bfloat16", "forge"]


@pytest.mark.usefixtures("on_the_cpu_too")
def test_the_benchmark_is_the_bench_with_the_machine_in_front(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["toy", "--json", "--quick", "--case", "4×8", "--against", "none"]
    monkeypatch.setattr("sys.argv", ["benchmarks.kernels", *words])
    assert kernels.main() == 0
    host, machine, row = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"cpu", "cores", "torch"} <= host["host"].keys()
    assert "bf16_flops_per_s" in machine["machine"]
    assert row["kernel"] == "toy"


@pytest.mark.usefixtures("on_the_cpu_too")
def test_a_kernel_that_breaks_its_promise_ends_in_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = toy_kernels.toy("toy")
    object.__setattr__(wrong, "function", lambda x: x * 0.6)
    monkeypatch.setattr(toy_kernels, "TOY", wrong)
    text = said(capsys, "bench", "toy", "--quick", "--case", "4×8", "--against", "none", code=1)
    assert "toy 4×8 in bfloat16 is off by" in text


# ---------------------------------------------------------------------------------------------------------------------
# Its parts


def rows_of(kernel: Kernel, *against: str) -> list[bench.BenchRow]:
    return list(bench.Bench(torch.device("cpu"), against, quick=True).rows(kernel))


def test_a_contender_that_fails_takes_no_other_figures_with_it() -> None:
    kernel = toy_kernels.toy("toy")
    object.__setattr__(kernel, "reference", lambda x: x / 0)
    object.__setattr__(kernel, "function", lambda x: (_ for _ in ()).throw(RuntimeError("no such instruction")))
    first, second, *_ = rows_of(kernel, "eager")
    assert (first.contender, first.ms, first.note) == ("forge", None, "RuntimeError: no such instruction")
    assert second.contender == "eager"
    assert second.ms is not None


def test_unsupported_arguments_are_told_and_not_timed() -> None:
    kernel = toy_kernels.toy("toy")
    object.__setattr__(kernel, "supports", lambda x: "it has no such dtype")
    rows = rows_of(kernel, "eager")
    assert {(row.contender, row.ms, row.note) for row in rows} == {
        ("forge", None, "not supported: it has no such dtype")
    }


def test_a_kernel_that_changes_lists_in_place_is_measured() -> None:
    def step(params: list[torch.Tensor], grads: list[torch.Tensor], *, lr: float) -> torch.Tensor:
        norm = torch.stack([g.norm() for g in grads]).norm()
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.sub_(gradient, alpha=lr)
        return norm

    def make(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        return [torch.randn(4), torch.randn(2, 3)], [torch.randn(4), torch.randn(2, 3)]

    def kernel(lr: float) -> Kernel:
        return Kernel(
            name="toy_step",
            summary="",
            function=lambda params, grads, lr: step(params, grads, lr=lr * 1.01),
            reference=step,
            supports=lambda *args, **options: None,
            tolerance={torch.float32: 1e-6},
            cost=lambda params, grads, lr: Cost(30, 120),
            cases=(Case("10", make, {"lr": lr}),),
        )

    assert [row.holds for row in rows_of(kernel(0.0))] == [True]
    (row,) = rows_of(kernel(1.0))
    assert not row.holds
    assert row.error is not None
    assert 1e-3 < row.error < 0.1


def test_torchs_own_functions_compute_what_the_references_do() -> None:
    from forge_kernels.ops.clip_adamw import CLIP_ADAMW
    from forge_kernels.ops.norms import LAYER_NORM, RMS_NORM
    from forge_kernels.ops.softmax import SOFTMAX

    x, weight, bias = torch.randn(4, 6), torch.randn(6), torch.randn(6)
    for kernel, args in ((LAYER_NORM, (x, weight, bias)), (RMS_NORM, (x, weight)), (SOFTMAX, (x,))):
        torch.testing.assert_close(eager(kernel)(*args), kernel.reference(*args))

    def lists() -> list[Any]:
        torch.manual_seed(0)
        made = [[torch.randn(4), torch.rand(2, 3)] for _ in range(3)]
        return [*made, [torch.rand(4), torch.rand(2, 3)], torch.tensor(1.0)]

    ours, theirs = lists(), lists()
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "max_norm": 0.5}
    torch.testing.assert_close(eager(CLIP_ADAMW)(*ours, **options), CLIP_ADAMW.reference(*theirs, **options))
    for a, b in ((ours[i], theirs[i]) for i in (0, 2, 3, 4)):
        torch.testing.assert_close(a, b)


def test_ligers_kernels_have_the_names_of_forges() -> None:
    pytest.importorskip("liger_kernel")
    from forge_kernels import liger

    for name in liger.ADAPTERS:
        assert callable(liger.adapted(name)), liger.adapted(name)


def test_the_bench_knows_whether_triton_is_interpreted() -> None:
    assert bench.INTERPRETED is contract.INTERPRETED
