"""Hostile checkpoints: whoever made the files, reading them runs no code, writes nothing, ends soon and stays small.

The attacker computes hashes too: most cases here carry a manifest that is right about their files.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.checkpoint import StoredCheckpoint, captured, manifest, tensors, write_checkpoint
from forge.errors import CheckpointError
from tests.conftest import PROFILE
from tests.support import forked

NAMES = (manifest.NAME, *manifest.FILES)
SEED = int(os.environ.get("FORGE_SEED") or (random.randrange(2**32) if PROFILE == "full" else 0))
MOST_MEMORY = 64 * 2**20
MOST_COST = 10
"""How much longer a refusal may take than Python takes to parse an innocent document of the largest size: about a
second in all, on a machine of any speed that is busy or not."""


@pytest.fixture(scope="module")
def innocent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint."""
    tree = {
        "model": {"a.w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)},
        "optimizers": {0: {"exp_avg": torch.zeros(2, 3), "z": torch.ones(2, dtype=torch.complex64)}, "t": (1, None)},
        "progress": {"update": 7, "loss": float("nan")},
    }
    folder = tmp_path_factory.mktemp("good") / "update-00000007"
    write_checkpoint(folder, tree)
    return folder


@pytest.fixture
def victim(innocent: Path, tmp_path: Path) -> Path:
    """A good checkpoint, to be made bad."""
    return shutil.copytree(innocent, tmp_path / innocent.name)


def sign(folder: Path) -> None:
    """Give the folder a manifest that is right about its files, as an attacker would."""
    records = {}
    for name in manifest.FILES:
        data = (folder / name).read_bytes()
        records[name] = manifest.FileRecord(len(data), hashlib.sha256(data).hexdigest())
    (folder / manifest.NAME).write_bytes(manifest.encode(records))


def sign_text(body: dict[str, Any]) -> bytes:
    """A manifest with any content and a hash over itself that is right."""
    text = json.dumps(body, indent=1).removesuffix("\n}").encode()
    return text + f',\n "sha256": "{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()


def header(entries: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


# -- watching what a load does ----------------------------------------------------------------------------------------

WATCHED = {
    *("exec", "compile", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.fork"),
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate"),
    *("socket.connect", "ctypes.dlopen", "shutil.rmtree"),
}
_seen: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event in WATCHED or writes:
        _seen.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_audit)


@contextmanager
def watched() -> Iterator[list[str]]:
    """What Python reports of code run and files changed meanwhile."""
    global _seen
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


@pytest.fixture(scope="module", autouse=True)
def _everything_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Once through, so that what Python and torch import at first use is not taken for an attack."""
    folder = tmp_path_factory.mktemp("warm") / "it"
    write_checkpoint(folder, {"model": {"w": torch.ones(2, dtype=torch.complex64)}})
    StoredCheckpoint(folder).load()
    with pytest.raises(CheckpointError):
        StoredCheckpoint(folder.with_name("no")).load()


def listing(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def check_refused(folder: Path, match: str = "update-") -> None:
    """verify, load and weights all refuse, and touch nothing."""
    before = listing(folder.parent)
    for use in (StoredCheckpoint.verify, StoredCheckpoint.load, StoredCheckpoint.weights):
        with watched() as seen, pytest.raises(CheckpointError, match=match):
            use(StoredCheckpoint(folder))
        assert not seen
    assert listing(folder.parent) == before


# -- pickles ----------------------------------------------------------------------------------------------------------


class Creates:
    """Unpickling this creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pickle", "torch.save", "behind a header"])
def test_a_pickle_in_any_file_is_never_run(kind: str, name: str, signed: bool, victim: Path, tmp_path: Path) -> None:
    created = tmp_path / "created"
    if kind == "torch.save":
        torch.save({"w": Creates(created)}, victim / name)
    else:
        data = pickle.dumps(Creates(created))
        (victim / name).write_bytes(header({"a": {"dtype": "U8"}}, data) if kind == "behind a header" else data)
    if signed and name != manifest.NAME:
        sign(victim)
    check_refused(victim, name)
    assert not created.exists()


# -- links, pipes, devices, directories -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_link_in_place_of_a_file_is_not_followed(name: str, victim: Path, tmp_path: Path) -> None:
    (victim / name).rename(tmp_path / name)
    (victim / name).symlink_to(tmp_path / name)
    check_refused(victim, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "endless device"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(kind: str, name: str, victim: Path) -> None:
    (victim / name).unlink()
    if kind == "pipe":
        os.mkfifo(victim / name)
    elif kind == "directory":
        (victim / name).mkdir()
    else:
        (victim / name).symlink_to("/dev/null" if kind == "device" else "/dev/zero")
    check_refused(victim, name)


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "loop"])
def test_what_is_no_directory_is_no_checkpoint(kind: str, victim: Path, tmp_path: Path) -> None:
    path = tmp_path / "update-00000008"
    if kind == "file":
        path.write_bytes(b"")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim if kind == "link" else path)
    check_refused(path, "update-00000008")


# -- manifests --------------------------------------------------------------------------------------------------------


def good(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / manifest.NAME).read_bytes())
    del content["sha256"]
    return content


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "outside": lambda m: m["files"].update({"../../etc/passwd": {"size": 1, "sha256": "0" * 64}}),
    "another file": lambda m: m["files"].update({"x": m["files"].pop("state.json")}),
    "a file less": lambda m: m["files"].pop("model.safetensors"),
    "huge size": lambda m: m["files"]["state.json"].update(size=2**70),
    "large size": lambda m: m["files"]["state.json"].update(size=2**40),
    "negative size": lambda m: m["files"]["state.json"].update(size=-1),
    "size as text": lambda m: m["files"]["state.json"].update(size="10"),
    "size as bool": lambda m: m["files"]["state.json"].update(size=True),
    "size as float": lambda m: m["files"]["state.json"].update(size=1.0),
    "no hash": lambda m: m["files"]["state.json"].pop("sha256"),
    "hash of another kind": lambda m: m["files"]["state.json"].update(sha256=[0]),
    "another format": lambda m: m.update(format="zip"),
    "no version": lambda m: m.pop("version"),
    "version as text": lambda m: m.update(version="1"),
    "version zero": lambda m: m.update(version=0),
    "version true": lambda m: m.update(version=True),
    "more keys": lambda m: m.update(load="os.system"),
    "files as list": lambda m: m.update(files=list(m["files"])),
    "other order": lambda m: m.update(format=m.pop("format")),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_says_what_it_must_and_nothing_else(case: str, victim: Path) -> None:
    content = good(victim)
    MANIFESTS[case](content)
    (victim / manifest.NAME).write_bytes(sign_text(content))
    check_refused(victim)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff" * 200,
        b"[" * 60_000,
        b" " * 70_000,
        b'{"format":1,"format":2}',
        sign_text({}),
    ],
    ids=range(9),
)
def test_what_is_no_manifest_is_refused(data: bytes, victim: Path) -> None:
    (victim / manifest.NAME).write_bytes(data)
    check_refused(victim, manifest.NAME)


def test_a_manifest_with_a_key_twice_is_refused(victim: Path) -> None:
    text = (victim / manifest.NAME).read_bytes().split(b',\n "sha256"')[0] + b',\n "version": 1'
    text += f',\n "sha256": "{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()
    (victim / manifest.NAME).write_bytes(text)
    check_refused(victim, "occurs twice")


# -- JSON -------------------------------------------------------------------------------------------------------------

NO_DOCUMENT: dict[str, bytes] = {
    "broken": b'{"a":',
    "two values": b"{}{}",
    "not ASCII": '{"é":1}'.encode(),
    "not UTF-8": b'{"\xff\xfe": 1}',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":-Infinity}',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "a key twice": b'{"a":1,"a":2}',
    "5,000 digits": b'{"a":' + b"9" * 5000 + b"}",
    "deep lists": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 900 + b"1" + b"}" * 900,
    "deep and open": b"[" * 100_000,
}
"""What neither a header nor state.json may be."""

# -- safetensors ------------------------------------------------------------------------------------------------------


def entry(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS: dict[str, bytes] = {
    **{name: header(text) for name, text in NO_DOCUMENT.items()},
    "empty": b"",
    "shorter than its length": b"\x01\x00",
    "no header": (0).to_bytes(8, "little"),
    "header beyond the file": (100).to_bytes(8, "little") + b"{}",
    "header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "a tensor twice": header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},' * 2 + b"}", b"x"),
    "really twice": header(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "a field twice": header(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "a field less": header({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
    "a field more": header({"a": {**entry(), "load": "os.system"}}, b"x"),
    "unknown dtype": header({"a": entry("PICKLE")}, b"x"),
    "dtype as list": header({"a": entry(["U8"])}, b"x"),
    "negative shape": header({"a": entry(shape=[-1])}, b"x"),
    "two negative sizes": header({"a": entry(shape=[-1, -1])}, b"x"),
    "shape of floats": header({"a": entry(shape=[1.0])}, b"x"),
    "shape of bools": header({"a": entry(shape=[True])}, b"x"),
    "shape as text": header({"a": entry(shape="1")}, b"x"),
    "overflowing shape": header({"a": entry(shape=[2**32, 2**32], offsets=[0, 0])}),
    "huge size": header({"a": entry(shape=[2**62], offsets=[0, 2**62])}),
    "huge number": header(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', b"x"),
    "huge empty": header({"a": entry(shape=[0, 2**62], offsets=[0, 0])}),
    "many dimensions": header({"a": entry(shape=[1] * 10_000)}, b"x"),
    "too large for its offsets": header({"a": entry("F32", [100])}, b"x"),
    "offsets backwards": header({"a": entry(offsets=[1, 0])}, b"x"),
    "offsets beyond": header({"a": entry(offsets=[1, 2])}, b"x"),
    "three offsets": header({"a": entry(offsets=[0, 1, 2])}, b"x"),
    "overlap": header({"a": entry(shape=[2], offsets=[0, 2]), "b": entry(shape=[2], offsets=[1, 3])}, b"xyz"),
    "a gap": header({"a": entry(), "b": entry(offsets=[2, 3])}, b"xyz"),
    "data beside": header({"a": entry()}, b"xy"),
    "data missing": header({"a": entry(shape=[2], offsets=[0, 2])}, b"x"),
    "metadata of objects": header({"__metadata__": {"a": {"b": 1}}}),
    "metadata in place of a tensor": header({"a": {"format": "pt"}}),
    "nested header": header({"a": {"b": entry()}}, b"x"),
    "other tensors": header({"a": entry()}, b"x"),
    "no tensors": header({}),
}


@pytest.mark.parametrize("case", SAFETENSORS)
@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors"])
def test_a_hostile_safetensors_file_is_refused(name: str, case: str, victim: Path) -> None:
    (victim / name).write_bytes(SAFETENSORS[case])
    sign(victim)
    check_refused(victim, "safetensors")


@pytest.mark.parametrize("case", [case for case in SAFETENSORS if case not in ("other tensors", "no tensors")])
def test_a_hostile_header_is_refused_before_a_tensor_is_made(case: str, tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(SAFETENSORS[case])
    with io.FileIO(tmp_path / "it") as stream, pytest.raises(CheckpointError, match="weights of mine"):
        tensors.read_header(stream, len(SAFETENSORS[case]), "weights of mine")


# -- state.json -------------------------------------------------------------------------------------------------------

STATES: dict[str, bytes] = {
    **NO_DOCUMENT,
    "empty": b"",
    "unknown marker": b'{"a":{"$pickle":"x"}}',
    "marker beside a key": b'{"a":{"$tuple":[],"b":1}}',
    "two markers": b'{"a":{"$tuple":[],"$dict":[]}}',
    "tensor outside": b'{"a":{"$state":"../../etc/passwd"}}',
    "absolute tensor": b'{"a":{"$model":"/etc/passwd"}}',
    "tensor of a list": b'{"a":{"$model":["a.w"]}}',
    "tensor of a number": b'{"a":{"$model":1}}',
    "tensor of an object": b'{"a":{"$model":{"b":1}}}',
    "unknown dtype": b'{"a":{"$model":["a.w","object"]}}',
    "dtype that does not fit": b'{"a":{"$model":["a.w","complex64"]}}',
    "fp8 of floats": b'{"a":{"$model":["a.w","float8_e8m0fnu"]}}',
    "tuple of text": b'{"a":{"$tuple":"abc"}}',
    "dict of an object": b'{"a":{"$dict":{"b":1}}}',
    "dict of triples": b'{"a":{"$dict":[[1,2,3]]}}',
    "dict with a key twice": b'{"a":{"$dict":[[1,2],[1,3]]}}',
    "dict with a list as key": b'{"a":{"$dict":[[[1],2]]}}',
    "dict with a dict as key": b'{"a":{"$dict":[[{"b":1},2]]}}',
    "dict with a bool as key": b'{"a":{"$dict":[[true,2]]}}',
    "dict with a tuple for a pair": b'{"a":{"$dict":[{"$tuple":[1,2]}]}}',
    "int of words": b'{"a":{"$int":"0xhello"}}',
    "int without 0x": b'{"a":{"$int":"12"}}',
    "int of an int": b'{"a":{"$int":1}}',
    "float of text": b'{"a":{"$float":"nan"}}',
    "float of nine bytes": b'{"a":{"$float":"000000000000000000"}}',
    "str of no hex": b'{"a":{"$str":"xyz"}}',
    "str of no UTF-8": b'{"a":{"$str":"ff"}}',
    "str of null": b'{"a":{"$str":null}}',
    "tensors left out": b"{}",
}


@pytest.mark.parametrize("case", STATES)
def test_a_hostile_state_json_is_refused(case: str, victim: Path) -> None:
    (victim / "state.json").write_bytes(STATES[case])
    sign(victim)
    check_refused(victim, r"state\.json|safetensors holds no matching tensor")


# -- counters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counting",
    [
        lambda count: {"progress": {"update": count}},
        lambda count: {"left_out": [count]},
        lambda count: {"requests": [{"update": count}]},
        lambda count: {"planned_updates": count},
    ],
)
def test_a_count_is_one_that_a_float_holds_exactly(counting: Callable[[int], dict[str, Any]]) -> None:
    for count in (0, 2**53 - 1):
        captured.check(counting(count), "it", counting(count))
    for count in (-1, 2**53, 2**64):
        with pytest.raises(CheckpointError, match=r"it: .* is .*; a count is a whole number from 0 to 2\^53"):
            captured.check(counting(count), "it", counting(count))


# -- bombs: time and memory -------------------------------------------------------------------------------------------

LIMIT = 4 * 2**20
ENTRY = b'"%07d":{"dtype":"U8","shape":[],"data_offsets":[0,1]}'
BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "lists": ("state.json", lambda: b'{"a":[' + b"[]," * (LIMIT // 3 - 20) + b"[]]}"),
    "as many keys as allowed": (
        "state.json",
        lambda: b"{" + b",".join(b'"%020d":{}' % i for i in range(43_000)) + b',"a":NaN}',
    ),
    "text": ("state.json", lambda: b'{"a":"' + b"x" * (LIMIT - 20) + b'",}'),
    "quotes": ("state.json", lambda: b'"' + rb"\"" * (LIMIT // 2 - 20)),
    "backslashes": ("state.json", lambda: rb'"\\"' * (LIMIT // 5 - 20)),
    "digits": ("state.json", lambda: b"1" * LIMIT),
    "header of tensors": (
        "model.safetensors",
        lambda: header(b"{" + b",".join(ENTRY % i for i in range(45_000)) + b"}", b"x"),
    ),
    "header of sizes": (
        "model.safetensors",
        lambda: header(b'{"a":{"dtype":"U8","shape":[' + b"1000," * 500_000 + b'1],"data_offsets":[0,1]}}', b"x"),
    ),
    "header too long": ("state.safetensors", lambda: header(b"{}" + b" " * (LIMIT + 1))),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_bomb_is_refused_soon_and_within_64_mb(case: str, victim: Path) -> None:
    name, make = BOMBS[case]
    (victim / name).write_bytes(make())
    sign(victim)
    attempts = (cost_in_child(victim) for _ in range(3))  # on a machine that others use too, one of three counts
    assert any(cost < MOST_COST and resident < MOST_MEMORY for cost, resident in attempts)


def cost_in_child(folder: Path) -> tuple[float, int]:
    """Cost and growth of resident memory of a load that must be refused, in a process of its own."""
    innocent = b"[" + b'{"a":1.5,"b":"text"},' * (LIMIT // 8 // 21) + b"1]"
    ends = os.pipe()
    child = forked.fork()
    if child == 0:
        try:
            gc.freeze()  # what the tests hold is not looked through meanwhile
            began = time.process_time()
            json.loads(innocent)
            yardstick = 8 * (time.process_time() - began)  # limit: CPU time, in units of an innocent load beside it
            before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
            try:
                StoredCheckpoint(folder).load()
            except CheckpointError:
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
                os.write(ends[1], json.dumps([(time.process_time() - began) / yardstick, grown * 1024]).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(ends[1])
    with os.fdopen(ends[0], "rb") as pipe:
        cost, resident = json.loads(pipe.read())
    return cost, resident


def test_a_file_that_claims_to_be_huge_is_not_read(victim: Path) -> None:
    with (victim / "state.json").open("r+b") as file:
        file.truncate(2**40)  # sparse
    content = good(victim)
    content["files"]["state.json"]["size"] = 2**40
    (victim / manifest.NAME).write_bytes(sign_text(content))
    check_refused(victim, "limit")


# -- mutations --------------------------------------------------------------------------------------------------------

PIECES = [
    *(b"-1", b"0", b"1e999", b"9999999999999999999999", b"null", b"true", b"[]", b"{}", b'"$state"', b'"../x"', b"NaN"),
    *(b'{"$tuple":[1]}', b'{"$dict":[[1,2]]}', b'"F64"', b'"BOOL"', b'{"$int":"0xff"}', b"[[[[", b"]]", b",", b'"a.w"'),
]


def mutate(data: bytes, dice: random.Random) -> bytes:
    """A changed file: JSON tokens exchanged, lengths changed, bytes flipped, moved, doubled or dropped."""
    how = dice.randrange(7)
    place = dice.randrange(len(data))
    other = dice.randrange(len(data))
    low, high = sorted((place, other))
    if how == 0:
        return data[:place] + bytes([dice.randrange(256)]) + data[place + 1 :]
    if how == 1:
        return data[:low] + data[high:]
    if how == 2:
        return data[:high] + data[low:]
    if how == 3:
        return data[:place] + dice.choice(PIECES) + data[place:]
    if how == 4:
        return (int.from_bytes(data[:8], "little") + dice.choice([-8, -1, 1, 8, 2**40])).to_bytes(9, "little")[
            :8
        ] + data[8:]
    tokens = [(begin, end) for begin, end in _tokens(data)]
    if not tokens:
        return data[:place]
    begin, end = dice.choice(tokens)
    if how == 5:
        return data[:begin] + dice.choice(PIECES) + data[end:]
    first, last = dice.choice(tokens)
    return data[:begin] + data[first:last] + data[end:]


def _tokens(data: bytes) -> Iterator[tuple[int, int]]:
    """Where the words and numbers of a JSON text are, roughly."""
    begin = None
    for i, byte in enumerate(data):
        plain = byte in b'"$_.+-' or chr(byte).isalnum()
        if plain and begin is None:
            begin = i
        elif not plain and begin is not None:
            yield begin, i
            begin = None


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files_give_a_typed_error_or_load(count: int, victim: Path, tmp_path: Path) -> None:
    originals = {name: (victim / name).read_bytes() for name in NAMES}
    folder = shutil.copytree(victim, tmp_path / "mutated" / "update-00000001")
    before = listing(tmp_path)
    refused = 0
    for case in range(count):
        dice = random.Random(f"{SEED}-{case}")
        for name, data in originals.items():
            (folder / name).write_bytes(data)
        for name in dice.sample(NAMES, dice.choice([1, 1, 2])):
            data = originals[name]
            for _ in range(dice.choice([1, 1, 1, 3])):
                data = mutate(data, dice) or b"x"
            (folder / name).write_bytes(data)
        if dice.random() < 0.9:
            sign(folder)
        with watched() as seen:
            try:
                loaded = StoredCheckpoint(folder).load()
            except CheckpointError:
                refused += 1
            except BaseException as error:
                pytest.fail(f"FORGE_SEED={SEED}, case {case}: {type(error).__name__}: {error}")
            else:
                assert isinstance(loaded, dict)
        assert not seen, f"FORGE_SEED={SEED}, case {case}: {seen}"
    assert listing(tmp_path) == before
    assert refused > count // 2
