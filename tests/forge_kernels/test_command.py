"""`forge kernels`: the list, one kernel's contract, and the bench."""

from __future__ import annotations

import json

import pytest
import torch

from forge import cli, registry
from forge_kernels import bench
from forge_kernels.contract import Kernel
from tests.support import toy_kernels
from tests.support.toy_kernels import entries


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    found = entries("toy", "toy_bare", "toy_linear", broken="a_package_that_nobody_has:KERNEL")
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
    assert "linear" in lines["toy_linear"]
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
    words = ["bench", "toy", "--quick", "--json", "--dtype", "float32,bfloat16", "--against", "eager"]
    machine, *rows = [json.loads(line) for line in said(capsys, *words).splitlines()]
    assert machine["machine"]["torch"] == torch.__version__
    assert machine["machine"]["copy_bytes_per_s"] > 0
    found = {(row["case"], row["dtype"], row["contender"]) for row in rows}
    assert found == {(c, d, w) for c in ("4×8", "6×8") for d in ("float32", "bfloat16") for w in ("forge", "eager")}
    assert all(row["ms_low"] <= row["ms"] <= row["ms_high"] and row["roofline"] > 0 for row in rows)
    assert all(row["error"] <= 1e-2 for row in rows)
    assert {row["tolerance"] for row in rows if row["contender"] == "forge"} == {1e-6, 1e-2}


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


def test_torchs_own_functions_compute_what_the_references_do() -> None:
    from forge_kernels.ops.norms import LAYER_NORM, RMS_NORM
    from forge_kernels.ops.softmax import SOFTMAX

    x, weight, bias = torch.randn(4, 6), torch.randn(6), torch.randn(6)
    for kernel, args in ((LAYER_NORM, (x, weight, bias)), (RMS_NORM, (x, weight)), (SOFTMAX, (x,))):
        torch.testing.assert_close(bench.TORCHS_OWN[kernel.name](*args), kernel.reference(*args))
