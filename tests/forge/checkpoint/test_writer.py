"""Writing in the background: the caller pays for a copy, and no error is ever taken for success."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from forge.checkpoint import BackgroundWriter, Checkpoints, StoredCheckpoint, copying, writer
from forge.errors import CheckpointError
from tests.forge.checkpoint.test_checkpoint import tree_of
from tests.forge.checkpoint.test_tree import ALL_DTYPES, same, tensor_of
from tests.support import forked
from tests.support.patience import PATIENCE


@pytest.fixture
def background() -> Iterator[BackgroundWriter]:
    made = BackgroundWriter()
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every write waits until this event is set."""
    opened, publish = threading.Event(), writer.publish

    def gated(*arguments: Any) -> None:
        assert opened.wait(PATIENCE)
        publish(*arguments)

    monkeypatch.setattr(writer, "publish", gated)
    yield opened
    opened.set()


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def fail_to_publish(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(writer, "publish", failing)


def test_every_dtype_and_layout_goes_through_the_buffers(background: BackgroundWriter, tmp_path: Path) -> None:
    state: list[Any] = [tensor_of(dtype, shape) for dtype in ALL_DTYPES for shape in ((), (0, 2), (3, 4))]
    state += [tensor_of(dtype, (3, 4)).t() for dtype in ALL_DTYPES]
    state += [tensor_of(dtype, (6,))[::2].expand(2, 3) for dtype in ALL_DTYPES]
    state += [tensor_of(torch.complex64, (3,)).conj(), tensor_of(torch.complex64, (3,)).conj().imag]
    for _ in range(2):  # fresh buffers, then kept ones
        background.submit(tmp_path / "it", {"state": state})
    background.wait()
    assert same(StoredCheckpoint(tmp_path / "it").load(), {"state": state})


def test_the_state_may_change_as_soon_as_submit_returns(
    background: BackgroundWriter, gate: threading.Event, tmp_path: Path
) -> None:
    tree = tree_of(1)
    background.submit(tmp_path / "it", tree)
    background.check()
    assert not list(tmp_path.iterdir())
    tree["model"]["w"].zero_()
    tree["progress"]["update"] = 99
    gate.set()
    background.wait()
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree_of(1))


def test_submit_waits_for_the_write_before(
    background: BackgroundWriter, gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    background.submit(tmp_path / "update-00000001", tree_of(1))
    copy, published_first = BackgroundWriter._copy, []

    def noted(self: BackgroundWriter, content: Any) -> Any:
        published_first.append((tmp_path / "update-00000001").exists())
        return copy(self, content)

    monkeypatch.setattr(BackgroundWriter, "_copy", noted)
    second = threading.Thread(target=background.submit, args=(tmp_path / "update-00000002", tree_of(2)))
    second.start()
    gate.set()
    second.join(PATIENCE)
    background.wait()
    assert published_first == [True]
    for number in (1, 2):
        assert same(StoredCheckpoint(tmp_path / f"update-0000000{number}").load(), tree_of(number))


def test_buffers_are_kept_between_saves(background: BackgroundWriter, tmp_path: Path) -> None:
    places = []
    for number in (1, 2):
        background.submit(tmp_path / "it", tree_of(number))
        background.wait()
        places.append({key: buffer.data_ptr() for key, buffer in background._buffers.items()})
    assert places[0] == places[1]
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree_of(2))


def test_buffers_follow_shapes_dtypes_and_names(background: BackgroundWriter, tmp_path: Path) -> None:
    for tensor in (torch.ones(3), torch.ones(4), torch.ones(4).double(), torch.ones(2, 2)):
        background.submit(tmp_path / "it", {"state": {"a": tensor}})
        background.wait()
        assert same(StoredCheckpoint(tmp_path / "it").load(), {"state": {"a": tensor}})
    background.submit(tmp_path / "it", {"state": {"b": torch.ones(1)}})
    background.wait()
    assert list(background._buffers) == [("state", "state.b")]


def test_a_save_inside_inference_mode_spoils_no_buffer(background: BackgroundWriter, tmp_path: Path) -> None:
    with torch.inference_mode():
        background.submit(tmp_path / "it", tree_of(1))
    background.submit(tmp_path / "it", tree_of(2))
    background.wait()
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree_of(2))


def test_writing_touches_no_random_numbers(background: BackgroundWriter, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    background.submit(tmp_path / "it", tree_of(1))
    background.wait()
    assert torch.equal(torch.get_rng_state(), before)


def test_then_runs_after_the_checkpoint_is_there(background: BackgroundWriter, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    seen: list[Any] = []

    def prune() -> None:
        seen.append((threading.current_thread() is threading.main_thread(), [path.name for path in checkpoints.all()]))

    background.submit(checkpoints.path(1), tree_of(1), prune)
    background.wait()
    assert seen == [(False, ["update-00000001"])]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("to_be_had", [True, False])
def test_every_byte_is_copied_with_any_number_of_threads(
    threads: int, to_be_had: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CHUNK", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if not to_be_had:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    sources = [random.Random(size).randbytes(size) for size in (0, 1, 999, 1000, 1001, 54_321)]
    targets = [bytearray(len(source)) for source in sources]
    copying.copy_bytes([*zip(map(memoryview, targets), map(memoryview, sources), strict=True)])
    assert targets == sources


def test_an_error_while_copying_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    small, large = memoryview(bytearray(95)), memoryview(bytes(100))
    with pytest.raises(ValueError, match="broadcast"):
        copying.copy_bytes([(small, large)])


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["submit", "wait", "check", "close"])
def test_an_error_of_the_thread_is_raised_by_the_next_call(
    ask: str, background: BackgroundWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    with monkeypatch.context() as patch:
        fail_to_publish(patch, RuntimeError("a broken disk"))
        background.submit(tmp_path / "it", tree_of(1), lambda: called.append(1))
        thread = background._thread
        assert thread is not None
        thread.join()
    calls: dict[str, Callable[[], None]] = {
        "submit": lambda: background.submit(tmp_path / "it", tree_of(2)),
        "wait": background.wait,
        "check": background.check,
        "close": background.close,
    }
    with pytest.raises(CheckpointError, match="a broken disk"):
        calls[ask]()
    assert not called
    assert not list(tmp_path.iterdir())
    background.submit(tmp_path / "it", tree_of(2))  # the next one is none the worse
    background.wait()
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree_of(2))


def test_an_error_is_logged_even_if_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forgotten = BackgroundWriter()
    fail_to_publish(monkeypatch, OSError("a broken disk"))
    forgotten.submit(tmp_path / "it", tree_of(1))
    assert forgotten._thread is not None
    forgotten._thread.join()
    assert any("a broken disk" in record.getMessage() for record in caplog.records)


def test_what_cannot_be_saved_is_refused_at_once(background: BackgroundWriter, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.b"):
        background.submit(tmp_path / "it", {"a": {"b": object()}})
    background.check()


def test_without_a_thread_to_be_had_it_writes_at_once(
    background: BackgroundWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    background.submit(tmp_path / "it", tree_of(1))
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree_of(1))


# -- forks and ends ---------------------------------------------------------------------------------------------------


def test_data_workers_may_be_forked_during_a_write(
    background: BackgroundWriter, gate: threading.Event, tmp_path: Path
) -> None:
    background.submit(tmp_path / "it", tree_of(1))
    batches = list(DataLoader([*range(8)], batch_size=2, num_workers=2, multiprocessing_context="fork"))  # pyright: ignore
    gate.set()
    background.wait()
    assert torch.cat(batches).tolist() == [*range(8)]
    assert same(StoredCheckpoint(tmp_path / "it").load(), tree_of(1))


@pytest.mark.parametrize("end", ["", "raise KeyError('the run failed')", "sys.exit(3)"], ids=["end", "error", "exit"])
def test_the_interpreter_waits_for_what_was_submitted(end: str, tmp_path: Path) -> None:
    code = f"""
import sys, threading, torch
from pathlib import Path
from forge.checkpoint import BackgroundWriter, writer
publish = writer.publish
writer.publish = lambda *arguments: (threading.main_thread().join(), publish(*arguments))
BackgroundWriter().submit(Path({str(tmp_path / "it")!r}), {{"model": {{"w": torch.ones(3)}}}})
{end}
"""
    done = forked.run([sys.executable, "-c", code], timeout=PATIENCE)
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(end, 1), done.stderr
    assert same(StoredCheckpoint(tmp_path / "it").load(), {"model": {"w": torch.ones(3)}})


# -- on the GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_state_on_the_gpu_is_copied_in_the_order_of_its_stream(background: BackgroundWriter, tmp_path: Path) -> None:
    weight = torch.zeros(2**24, device="cuda")
    for number in range(1, 4):
        torch.cuda._sleep(50_000_000)  # whoever does not wait for the stream reads the number before
        weight.fill_(number)
        pairs = torch.view_as_complex(weight.view(-1, 2)).conj()
        state = {"half": weight[::2], "conjugate": pairs, "negative": pairs.imag}
        background.submit(tmp_path / f"update-0000000{number}", {"model": {"w": weight}, **state})
        weight.fill_(-1)
    background.wait()
    for number in range(1, 4):
        loaded = StoredCheckpoint(tmp_path / f"update-0000000{number}").load()
        assert torch.equal(loaded["model"]["w"], torch.full((2**24,), float(number)))
        assert torch.equal(loaded["half"], torch.full((2**23,), float(number)))
        assert torch.equal(loaded["conjugate"], torch.full((2**23,), complex(number, -number)))
        assert torch.equal(loaded["negative"], torch.full((2**23,), -float(number)))
    assert all(buffer.is_pinned() for buffer in background._buffers.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_comes_over_from_the_gpu(dtype: torch.dtype, background: BackgroundWriter, tmp_path: Path) -> None:
    here = [tensor_of(dtype, shape) for shape in ((), (0, 2), (3, 4))]
    tree = {"state": [tensor.cuda() for tensor in here]}
    background.submit(tmp_path / "it", tree)
    background.wait()
    assert same(StoredCheckpoint(tmp_path / "it").load(), {"state": here})
