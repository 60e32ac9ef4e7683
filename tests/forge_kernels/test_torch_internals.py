"""The private names of torch: they are there, in one module, and have an answer for the day that they are gone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import forge_kernels
from forge.errors import KernelError
from forge_kernels import torch_internals
from forge_kernels.ops.softmax import SOFTMAX
from forge_kernels.triton.cross_entropy import times

PACKAGE = Path(forge_kernels.__file__).parent
SEAM = PACKAGE / "torch_internals.py"


def private_names(file: Path) -> set[str]:
    """The dotted names of a file that begin with torch and have a private part."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    private = (name for name in found if any(part[0] == "_" and part[:2] != "__" for part in name.split(".") if part))
    return {name for name in private if name.startswith("torch.")}


def test_this_torch_has_every_name() -> None:
    assert torch_internals.missing() == {}


def test_a_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep")
    monkeypatch.setitem(torch_internals.NAMES, "torch._no_such_module.thing", "nothing")
    assert list(torch_internals.missing()) == ["torch.cuda._sleep", "torch._no_such_module.thing"]


def test_no_other_module_touches_a_private_name() -> None:
    others = [file for file in PACKAGE.rglob("*.py") if file != SEAM]
    assert len(others) > 30
    assert {str(file): names for file in others if (names := private_names(file))} == {}


def test_every_private_name_of_the_module_is_in_the_table() -> None:
    listed = tuple(torch_internals.NAMES)
    assert private_names(SEAM)
    for name in private_names(SEAM):
        assert any(known == name or known.startswith(f"{name}.") for known in listed), name


def test_without_the_test_for_transforms_plain_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    monkeypatch.setattr(torch_internals, "_functorch_is_active", None)
    assert "torch.func" in (SOFTMAX.supports(x) or "")
    torch.testing.assert_close(SOFTMAX.function(x), F.softmax(x, -1))


def test_without_knowing_the_graph_no_gradient_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(saved)
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return times(ctx.saved_tensors[0], grads[0])

    def overwrites() -> bool:
        saved.fill_(1.0)
        Scaled.apply(torch.ones(4, requires_grad=True)).backward(torch.tensor(2.0))
        return bool(saved[0] == 2)

    saved = torch.ones(4)
    assert overwrites()
    monkeypatch.delattr("torch._C._autograd._get_current_graph_task_keep_graph")
    assert not overwrites()


def test_without_the_compilers_pass_kernels_in_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
    with pytest.raises(KernelError, match=r"cannot be put into compiled graphs with torch .*kernels\.leave_out"):
        torch_internals.rewriting_graphs(None)


def test_what_only_helps_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep")
    torch_internals.sleep_on_device(1)
    monkeypatch.delattr(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    assert torch_internals.autocast_widens("layer_norm") is None
    from torch._dynamo import trace_rules

    monkeypatch.delattr(trace_rules, "get_torch_obj_rule_map")
    torch_internals.build_dynamo_table(soon=True)
