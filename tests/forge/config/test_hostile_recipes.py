"""Recipes that would take all memory or time are refused in one line; references are read as OmegaConf reads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge.config import references
from forge.config.files import read
from forge.errors import RecipeError
from forge.util import strict_yaml
from tests.support import limited
from tests.support.profiles import some


def layers(line: str, count: int) -> str:
    """A recipe whose task has values v0, v1 …, each made of the one before (PREVIOUS)."""
    lines = [line.replace("PREVIOUS", f"v{i}").replace("OWN", f"v{i + 1}") for i in range(count)]
    return "\n  ".join(["task:", "v0: &v0 " + "x" * 20, *lines])


HOSTILE = {
    "texts that multiply": layers("OWN: '" + "${task.PREVIOUS}" * 12 + "'", 9),
    "relative ones": layers("OWN: '" + "${.PREVIOUS}" * 12 + "'", 9),
    "lists that multiply": layers("OWN: [" + "'${task.PREVIOUS}'," * 12 + "]", 9),
    "aliases that multiply": layers("OWN: &OWN [" + "*PREVIOUS," * 12 + "]", 9),
    "aliases of references": layers("OWN: &OWN ['${task.v0}'," + "*PREVIOUS," * 12 + "]", 9),
    "merged keys that multiply": "task:\n  v0: &v0 {a: 1}\n"
    + "".join(f"  v{i + 1}: &v{i + 1} {{a: *v{i}, b: *v{i}, <<: *v{i}}}\n" for i in range(30)),
    "keys that multiply": layers("OWN: '" + "${${task.PREVIOUS}}" * 12 + "'", 9),
    "many texts of a large one": "task:\n  a: "
    + "x" * 50_000
    + "\n"
    + "".join(f"  a{i}: '${{task.a}}'\n" for i in range(3000)),
    "deep lists": "task: {a: " + "[" * 9000 + "]" * 9000 + "}",
    "deep blocks": "task:\n" + "".join(" " * i + "a:\n" for i in range(1, 400)),
    "deep by references": "task:\n  v0: [1]\n" + "".join(f"  v{i + 1}: ['${{task.v{i}}}']\n" for i in range(600)),
    "a long chain": "task:\n" + "".join(f"  v{i}: ${{task.v{i + 1}}}\n" for i in range(2500)),
    "nested references": "task: {a: '" + "${" * 20_000 + "}" * 20_000 + "'}",
    "a circle": "task: {a: '${task.b}', b: '${task.a}'}",
    "a value inside itself": "task: {a: &a [*a]}",
    "a section inside itself": "task: {a: '${task}'}",
    "a long number": "trainer: {seed: " + "9" * 5000 + "}",
    "a longer number": "trainer: {seed: 0x" + "f" * 5000 + "}",
    "a large file": "task: {a: 1}\n" + "#" * 30_000_000,
    "a long key": "task: {" + "k" * 5000 + ": 1}",
    "a date": "task: {a: !!timestamp x}",
    "half a sign": 'task: {a: "\\ud800"}',
    "a set": "task: {a: !!set {x}}",
    "bytes that are no text": "\xff",
}


@pytest.mark.parametrize("name", some(HOSTILE, quick=3))
def test_a_hostile_recipe_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(HOSTILE[name], encoding="latin-1")
    done = limited.forge("plan", str(file))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(" ".join(done.stderr.split())) < 700
    assert done.stderr


@pytest.mark.parametrize(
    "override",
    some(["task.a=" + "[" * 9000 + "]" * 9000, "task" + ".a" * 9000 + "=1", "trainer.seed=0x" + "f" * 5000], quick=1),
)
def test_a_hostile_override_is_refused_in_a_line(override: str) -> None:
    done = limited.forge("plan", "quickstart", override)
    assert done.returncode == 2, done.stderr
    assert "command line" in done.stderr
    assert len(done.stderr) < 700


def test_bases_are_bounded_together(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"b{number}.yaml").write_text(f"extends: [b{number + 1}.yaml]\ntask: {{a{number}: 1}}")
    done = limited.forge("plan", str(tmp_path / "b0.yaml"))
    assert done.returncode == 2
    assert "with its bases is nested deeper" in done.stderr


@pytest.mark.slow
def test_the_largest_recipe_is_read_within_the_limits(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("task:\n" + "".join(f"  a{i}: 1\n" for i in range(5500)))
    done = limited.call(partial(_read, file))
    assert done.returncode == 0, done.stderr


def _read(file: Path) -> int:
    return 0 if len(read(file).values["task"]) == 5500 else 1


# -- references, compared with OmegaConf ------------------------------------------------------------------------------

PLAIN = {
    "a": "A",
    "b": 3,
    "c": None,
    "l": [5, {"x": 6}],
    "d": {"x": 8, "é": 9, "1": 7},
    "t": True,
    "f": 1e-05,
    "k": "d",
}
PIECES = r"${ } a b l d x k é . .. [ ] 0 1 -1 \ \\ $ { - ${a} ${b} "
PIECES += r"${d.x} ${.a} ${l[1].x} ${l.0} ${d.${y}} ${${k}} ${l} ${d} ${c}"
pieces = st.sampled_from([" ", "${${k}.x}", *PIECES.split()])


@given(st.lists(pieces, max_size=7).map("".join))
def test_a_text_is_read_as_omegaconf_reads_it(text: str) -> None:
    values = {**PLAIN, "y": "x", "s": text, "n": {"s": text, "a": 4, "x": 2}}
    try:
        expected = OmegaConf.to_container(OmegaConf.create(values), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException:
        with pytest.raises(RecipeError):
            references.resolved(values, str)
    else:
        assert references.resolved(values, str) == expected


TEXTS = """1e-3 | 1e3 | -1.5E+3 | .5e1 | 1_0e2 | 0x1f | 010 | 1:30 | 2026-01-01 | yes | ~ | null | '1' | 1. | +.inf | e3
| 1e | 1.e3 | -.5e-3 | [1e-3, x] | {a: {<<: {b: 1}, b: 2}} | a: b | &a [1] | [&x {k: 1}, {<<: *x, j: 2}] | |"""


@pytest.mark.parametrize("text", TEXTS.split("|"))
def test_yaml_is_read_as_omegaconf_reads_it(text: str) -> None:
    expected = OmegaConf.to_container(OmegaConf.create(f"value:\n {text.strip()}"))
    assert {"value": strict_yaml.load(text, "it")} == expected
