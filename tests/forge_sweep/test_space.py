"""Ranges are read as they are written, and what is wrong with one is said."""

from __future__ import annotations

import pytest

from forge.errors import ForgeError, RecipeError
from forge_sweep.space import combinations, is_space, parse_space, parse_spaces
from forge_sweep.study import SweepPlan


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("task.lr=log(1e-4, 1e-1)", "task.lr=0.0001"),
        ("task.p=uniform(0,0.5)", "task.p=0.0"),
        ("task.depth=int(2,8)", "task.depth=2"),
        ("task.depth=int(2,9,3)", "task.depth=2"),
        ("task.hidden=logint(16,1024)", "task.hidden=16"),
        ("task.hidden=choice(64,256)", "task.hidden=64"),
        ("task.act=choice(relu,gelu)", "task.act=relu"),
        ("task.sizes=choice([64,32],[128])", "task.sizes=[64,32]"),
        ("clip.max_norm=choice(null,1.0)", "clip.max_norm=null"),
        ("task.word=choice('a,b',\"c\")", "task.word='a,b'"),
    ],
)
def test_a_range_is_read_and_gives_overrides(text: str, override: str) -> None:
    assert is_space(text)
    space = parse_space(text)
    assert space.override(space.example) == override
    assert parse_space(f"{space.key}={space}") == space


def test_a_value_is_no_range() -> None:
    assert not is_space("task.lr=0.1")
    assert not is_space("task.name=choice")
    assert not is_space("-p")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("task.lr=0.1", "one of log"),
        ("task.lr=log(0,1)", "above 0"),
        ("task.lr=log(1,0.1)", "the lowest and then the highest"),
        ("task.lr=log(1)", "the lowest and then the highest"),
        ("task.lr=uniform(a,b)", r"choice\(a,b\)"),
        ("task.n=int(1.5,3)", "whole numbers"),
        ("task.n=int(1,9,0)", "the lowest and then the highest"),
        ("task.n=choice(1)", "two different values"),
        ("task.n=choice(1,1)", "two different values"),
        ("=log(1,2)", "is no range"),
    ],
)
def test_what_is_wrong_with_a_range_is_said(text: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        parse_space(text)


def test_a_sweep_needs_one_range_for_each_option() -> None:
    with pytest.raises(RecipeError, match="needs an option to vary"):
        parse_spaces([])
    with pytest.raises(RecipeError, match="two ranges"):
        parse_spaces(["task.lr=log(1,2)", "task.lr=uniform(1,2)"])


def test_a_grid_has_every_combination_in_order() -> None:
    spaces = parse_spaces({"a": "choice(1,2)", "b": "int(0,4,2)"})
    assert combinations(spaces) == [{"a": a, "b": b} for a in (1, 2) for b in (0, 2, 4)]
    assert SweepPlan(spaces, "val/loss", "min", "grid").limit(100) == 6
    with pytest.raises(RecipeError, match="a grid takes values"):
        SweepPlan(parse_spaces({"a": "uniform(0,1)"}), "val/loss", "min", "grid")


@pytest.mark.parametrize("wrong", [{"mode": "most"}, {"sampler": "luck"}, {"seed": -1}])
def test_a_plan_refuses_what_it_does_not_know(wrong: dict[str, object]) -> None:
    plan: dict[str, object] = {"mode": "max", "sampler": "tpe", "seed": 0, **wrong}
    with pytest.raises(ForgeError, match=str(next(iter(wrong.values())))):
        SweepPlan(parse_spaces({"a": "int(0,4)"}), "val/loss", **plan)  # pyright: ignore[reportArgumentType]
