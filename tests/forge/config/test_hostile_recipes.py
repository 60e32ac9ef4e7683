"""A recipe that would take all memory or time, or read what is not its own, is refused in a line, at its line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import forge
from forge.config import read_recipe
from forge.config.guard import DEEPEST, LIMITS, SIZE, parse
from forge.errors import RecipeError
from tests.support import limited
from tests.support.profiles import some

SECRET = "FORGE_TEST_TOKEN"


def values(count: int, line: str, first: str = "v0: " + "x" * 20) -> str:
    """A recipe whose task has values v0, v1 …, each made of the one before (PREVIOUS)."""
    lines = [line.replace("PREVIOUS", f"v{i}").replace("OWN", f"v{i + 1}") for i in range(count)]
    return "\n  ".join(["task:", first, *lines])


HOSTILE: dict[str, tuple[str, int]] = {
    "duplicate keys": ("trainer:\n  seed: 1\n  seed: 2", 3),
    "duplicate sections": ("trainer: {}\ntrainer: {}", 2),
    "an unknown key": ("task: {}\nplugin: {}", 2),
    "aliases that multiply": (values(9, "OWN: &OWN [" + "*PREVIOUS," * 12 + "]", "v0: &v0 [1]"), 2),
    "merged keys that multiply": ("task:\n  a: &a {b: 1}\n  c: {<<: *a}", 2),
    "a value inside itself": ("task:\n  a: &a [*a]", 2),
    "texts that double": (values(25, "OWN: '${task.PREVIOUS}${task.PREVIOUS}'"), 4),
    "relative ones": (values(16, "OWN: '" + "${.PREVIOUS}" * 12 + "'"), 4),
    "lists that double": (values(16, "OWN: ['${task.PREVIOUS}', '${task.PREVIOUS}']"), 4),
    "names made of references": ("task:\n  a: b\n  c: ${task.${task.a}}", 3),
    "a long chain": (values(190, "OWN: ${task.PREVIOUS}"), 4),
    "many references": (
        "trainer: {seed: 1}\ntask:\n" + "".join(f"  a{i}: ${{trainer.seed}}\n" for i in range(300)),
        203,
    ),
    "many texts of a large one": (
        f"task:\n  a: {'x' * 60_000}\n" + "".join(f"  b{i}: '${{task.a}}'\n" for i in range(50)),
        4,
    ),
    "a circle": ("task:\n  a: '${task.b}'\n  b: '${task.a}'", 2),
    "a section inside itself": ("task:\n  a: '${task}'", 2),
    "a key that is not there": ("trainer:\n  max_epochs: ${trainer.nope}", 2),
    "nested references": ("task:\n  a: '" + "${" * 20_000 + "}" * 20_000 + "'", 2),
    "deep lists": ("task:\n  a: " + "[" * 60_000, 2),
    "deep mappings": ("task:\n" + "".join(" " * i + "a:\n" for i in range(1, 400)), DEEPEST + 1),
    "deep by a reference": ("task:\n  a: " + "[" * 15 + "1" + "]" * 15 + "\n  b: [[[['${task.a}']]]]", 3),
    "many values": ("task:\n  a: [" + "1, " * 40_000 + "]", 2),
    "10 MB of noise": ("\xfe\x00\x9b" * 3_500_000, 1),
    "10 MB of comments": ("#\n" * 5_000_000, SIZE // 2 + 1),
    "a long text": ("task:\n  a: " + "x" * 200_000, 2),
    "the environment": ("trainer:\n  device: ${oc.env:" + SECRET + "}", 2),
    "the environment, in a text": ("task:\n  a: [1, {b: 'a ${oc.env:" + SECRET + ",none} b'}]", 2),
    "the environment, nested": ("task:\n  a: ${oc.decode:'${oc.env:" + SECRET + "}'}", 2),
    "the environment, as part of a key": ("task:\n  a: ${task.${oc.env:" + SECRET + "}}", 2),
    "a resolver made of references": ("description: env\ntask:\n  a: ${oc.${description}:" + SECRET + "}", 3),
    "a resolver of the user's": ("task:\n  a: ${users_own:1}", 2),
    "null bytes": ("task:\n  a: x\0y", 2),
    "half a sign": ('task:\n  a: "\\ud800"', 2),
    "bytes that are no text": ("task:\n  a: \xff", 2),
    "bytes": ("task:\n  a: !!binary aGk=", 2),
    "an object": ("task:\n  a: !!python/object/apply:os.system [echo]", 2),
    "an import path": ("plugins:\n  clip: {x: [{_target_: os.system}]}", 2),
    "a date that is none": ("task:\n  a: !!timestamp x", 2),
    "a long number": ("trainer:\n  seed: " + "9" * 5000, 2),
    "a number beyond 64 bits": ("task:\n  a: 100000000000000000000", 2),
    "a number of sixties": ("task:\n  a: 1" + ":20" * 5000, 2),
    "a long key": ("task:\n  ? " + "k" * 5000 + "\n  : 1", 2),
    "a key that is a list": ("task:\n  ? [1]\n  : 1", 2),
    "a second document": ("task: {}\n---\ntask: {}", 2),
    "broken YAML": ("trainer: {max_epochs: 1\n", 2),
    "no mapping": ("- a", 1),
}


@pytest.fixture
def write(tmp_path: Path):
    """Write a recipe file, each character a byte, and return its path."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="latin-1")
        return path

    return write


def refuses(place: str, done: Any) -> None:
    """Check that a command ended with one line for the user, which names the place."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert place in " ".join(done.stderr.split())
    assert len(" ".join(done.stderr.split())) < 700


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_refused_at_its_line(name: str, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "seed")
    text, line = HOSTILE[name]
    refuses(f"a.yaml:{line}", limited.call(partial(_read, write("a.yaml", text)), seconds=1.0))


def _read(file: Path) -> int:
    """Read a recipe, as a command does that refuses it."""
    import sys

    try:
        read_recipe(file)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


BOMBS = ["texts that double", "deep lists", "10 MB of noise", "the environment, nested", "duplicate keys"]


@pytest.mark.parametrize("name", some(BOMBS, quick=1))
@pytest.mark.parametrize("way", ["fit", "base", "run"])
def test_so_it_is_wherever_a_recipe_is_read(name: str, way: str, write: Any, tmp_path: Path) -> None:
    text, line = HOSTILE[name]
    file = write("config.yaml", text)
    words = ["fit", str(file)]
    if way == "base":
        words = ["plan", str(write("mine.yaml", "extends: [config.yaml]"))]
    if way == "run":
        (tmp_path / "card.json").write_text(json.dumps({"format": 1}))
        words = ["validate", "quickstart", "--weights", str(tmp_path)]
        refuses("config.yaml", limited.call(partial(_load, tmp_path)))
    else:
        refuses(f"config.yaml:{line}", limited.forge(*words))


def _load(folder: Path) -> int:
    import sys

    try:
        forge.load(folder)
    except forge.ForgeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


OVERRIDES = {
    "deep": "task.a=" + "[" * 9000 + "]" * 9000,
    "deep keys": "task" + ".a" * 9000 + "=1",
    "a long number": "trainer.seed=0x" + "f" * 5000,
    "the environment": "trainer.device=${oc.env:" + SECRET + "}",
    "a circle": "task.lr=${task.lr}",
    "half a sign": "task.name=\udcff",
}


@pytest.mark.parametrize("name", some(OVERRIDES, quick=2))
def test_a_hostile_override_is_refused(name: str) -> None:
    refuses("command line", limited.forge("plan", "quickstart", OVERRIDES[name]))


def test_bases_are_bounded_together(write: Any) -> None:
    for number in range(300):
        write(f"deep{number}.yaml", f"extends: [deep{number + 1}.yaml]\ntask: {{a{number}: 1}}")
    with pytest.raises(RecipeError, match=rf"deep0.yaml extends deep21.yaml over more than {DEEPEST}"):
        read_recipe(write("a.yaml", "extends: [deep0.yaml]").with_name("deep0.yaml"))
    for number in range(30):
        write(f"wide{number}.yaml", "task: {" + ", ".join(f"a{number}_{i}: 1" for i in range(100)) + "}")
    with pytest.raises(RecipeError, match=rf"wide9.yaml:1: more than {LIMITS['keys and values']:,} keys and values"):
        read_recipe(write("b.yaml", f"extends: [{', '.join(f'wide{i}.yaml' for i in range(30))}]"))


def test_a_base_cannot_multiply_what_a_reference_names(write: Any) -> None:
    write("a.yaml", "task: {a: {x: 1}, b: '${task.a}', c: '${task.a}'}")
    write("b.yaml", "extends: [a.yaml]\ntask: {b: {y: '${task.c}'}}")
    assert read_recipe(write("c.yaml", "extends: [b.yaml]\ntask: {c: {z: 2}}")).config["task"] == {
        "a": {"x": 1},
        "b": {"y": {"z": 2}},
        "c": {"z": 2},
    }


@pytest.mark.slow
def test_the_largest_recipe_is_read_within_the_limits(write: Any) -> None:
    lines = "".join(f"  a{i}: ${{trainer.device}}\n" for i in range(200)) + "".join(f"  b{i}: 1\n" for i in range(700))
    file = write("a.yaml", "trainer: {device: cpu}\ntask:\n" + lines + "  text: " + "x" * 100_000)
    done = limited.call(partial(_read, file), seconds=2.0)
    assert done.returncode == 0, done.stderr


# -- what passes is read as OmegaConf reads it ------------------------------------------------------------------------

READ = {
    "no": False, "on": True, "1:20": 80, "1e-3": 1e-3, "-1.5E+3": -1500.0, ".5e1": ".5e1", "1_0e2": 1000.0, "0x1f": 31,
    "010": 8, "2026-01-01": "2026-01-01", "~": None, "": None, "'1'": "1", "+.inf": float("inf"), "e3": "e3",
    "[1e-3, x]": [1e-3, "x"], "{a: {<<: {b: 1}, b: 2}}": {"a": {"b": 2}}, "18446744073709551615": 2**64 - 1,
    "012345678901234567890abc": "012345678901234567890abc",
}  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_a_value_is_read_as_a_person_means_it(text: str) -> None:
    assert parse(f"value: {text}", "it").values == {"value": READ[text]}


PLAIN = {"a": "A", "b": 3, "c": None, "l": [5, {"x": 6}], "d": {"x": 8, "é": 9, "1": 7}, "t": True, "f": 1e-05}
PIECES = r"${ } a b l d x é . .. [ ] 0 1 -1 \ \\ $ { - : ${a} ${b} ${d.x} ${.a} ${..b} ${l[1].x} ${l.0} ${l} ${d} ${c}"
pieces = st.sampled_from([" ", "${${a}.x}", "${oc.env:HOME}", *PIECES.split()])


@given(st.lists(pieces, max_size=7).map("".join))
def test_a_text_that_passes_is_resolved_as_omegaconf_does(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    values = {"task": {**PLAIN, "s": text, "n": {"s": text, "a": 4, "x": 2}}}
    file = tmp_path_factory.mktemp("recipes") / "a.yaml"
    file.write_text(json.dumps(values))
    try:
        found = read_recipe(file).config["task"]
    except RecipeError as refused:
        said = str(refused)
    else:
        said = "a.yaml:1"
        assert found == OmegaConf.to_container(OmegaConf.create(values).task, resolve=True)
        assert "oc.env" not in text
    assert "a.yaml:1" in said
