"""The seam to torch: private names are found when they are asked for; a missing one refuses by name when used."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from forge import ForgeError
from forge.torch_internals import Internal, Missing, foreach, resolve


def gone(path: str = "torch._gone.thing", **options: Any) -> Internal:
    return Internal(path, "draw a cow", "No cow is drawn.", **options)


def test_importing_the_seam_imports_no_torch() -> None:
    code = "import forge.torch_internals, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_torch_rebinds_is_looked_up_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"flag": Internal("torch.autograd.profiler._is_profiler_enabled", "look", "Nothing.", changes=True)}
    assert resolve("flag", names, {}) is False
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    assert resolve("flag", names, {}) is True


@pytest.mark.parametrize("use", [lambda x: x(), lambda x: x.part])
def test_a_missing_name_refuses_by_name_when_it_is_used(use: Any) -> None:
    missing = gone().get()
    with pytest.raises(
        ForgeError, match=r"has no torch\._gone\.thing, which forge uses to draw a cow\. No cow is drawn"
    ):
        use(missing)


def test_what_stands_in_for_a_missing_name_is_used() -> None:
    assert gone(or_else=lambda: 7).get() == 7
    assert gone(or_else=lambda: None).get() is None


def test_a_missing_part_is_refused_and_the_others_work() -> None:
    partly = gone("torch.utils._pytree", parts="tree_map tree_gone").get()
    assert isinstance(partly, Missing)
    assert partly.tree_map is torch.utils._pytree.tree_map
    with pytest.raises(ForgeError, match=r"has no torch\.utils\._pytree\.tree_gone"):
        partly.tree_gone()


def test_a_name_of_another_build_is_not_counted_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = gone(build="torch.backends.cuda.is_built")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert listed.lacking() == ["torch._gone.thing"]
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert listed.lacking() == []


@pytest.mark.parametrize(
    ("method", "others"),
    [("copy_", [[3.0, 4.0]]), ("mul_", [[3.0, 4.0]]), ("mul_", [0.1]), ("lerp_", [[3.0, 4.0], 0.3]), ("abs", [])],
)
def test_many_tensors_one_by_one_give_the_same_bits(method: str, others: list[Any]) -> None:
    listed = foreach(method)
    others = [[torch.full((3,), value) for value in other] if isinstance(other, list) else other for other in others]
    results = []
    for function in (listed.get(), listed.or_else()):  # pyright: ignore[reportOptionalCall]
        tensors = [torch.tensor([0.1, -0.2, 0.3]), torch.tensor([-1.0, 2.0, 5.0])]
        returned = function(tensors, *others)
        results.append(torch.stack(list(returned) if returned else tensors))
    assert torch.equal(*results)
