"""What every test gets: an empty folder to stand in, one torch thread, a hypothesis profile.

`FORGE_PROFILE=quick` (the default) draws few examples with a fixed seed, so `make test` says the same thing every time;
`FORGE_PROFILE=full` draws many, and runs the tests marked `slow` too (so does `--slow`). `FORGE_ORDER=SEED` is
another order.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from _pytest.logging import LogCaptureHandler, caplog_handler_key, catching_logs
from hypothesis import HealthCheck, settings

import forge
import forge.env
from tests.support import forked
from tests.support.patience import PATIENCE
from tests.support.small_data import write_small_data

REPO = Path(__file__).resolve().parent.parent
PROFILE = os.environ.get("FORGE_PROFILE", "quick")
PLAIN = {"COLUMNS": "160", "NO_COLOR": "1"}
"""What processes print is 160 characters wide, without colours."""

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # a thread of it asks a server, and changes the environment later

os.environ["FORGE_REHEARSE"] = "off"  # a second process for each of thousands of short runs; its tests switch it on

settings.register_profile("quick", derandomize=True, max_examples=8, deadline=None)
settings.register_profile(
    "full", max_examples=500, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(PROFILE)

multiprocessing.set_start_method("fork")  # as before Python 3.14: workers get datasets that tests define inside
torch.set_num_threads(1)
torch.zeros((), requires_grad=True).backward()  # a first one after torch.export starts threads: no rehearsal then
gc.disable()  # until all is collected: what modules and tests are made of is no garbage
if PROFILE == "quick":
    os.fsync = lambda descriptor: None  # no test cuts the power, and a disk takes milliseconds each time
atexit.register(gc.unfreeze)  # for those who look at the end of a process for what was never freed

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it in the background; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: kernels run in its interpreter
    torch.cuda.device_count = lambda: 0  # torch looks for a driver's library again at each call
    for backend in (torch.cuda, torch.xpu, torch.mtia):  # each formats a stack at every seed, for a device to come
        backend.manual_seed_all = lambda seed: None

IS_CORE_ALONE = not any(find_spec(path.parent.name) for path in REPO.glob("plugins/forge_*/pyproject.toml"))

Completed = subprocess.CompletedProcess[str]
Run = Callable[..., Completed]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def imports_what_is_away(path: Path) -> bool:
    """Whether a file imports at its top what is not installed, itself or by a module of tests/support."""
    text = path.read_text(encoding="utf-8").replace("from tests.support import ", "from tests.support.")
    found = re.findall(r"^(?:from|import) ([\w.]+)", text, re.MULTILINE)
    support = [REPO / f"{name.replace('.', '/')}.py" for name in found if name.startswith("tests.support.")]
    return any(find_spec(name.partition(".")[0]) is None for name in found) or any(map(imports_what_is_away, support))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What would be skipped as a whole is not imported, unless it is named: tests of a GPU, of a browser, and of
    packages where the core is installed alone."""
    if any(collection_path == Path(word.partition("::")[0]).resolve() for word in config.args):
        return None
    of_a_gpu = collection_path.name.endswith("_cuda.py") and not torch.cuda.is_available()
    if IS_CORE_ALONE and collection_path.suffix == ".py" and imports_what_is_away(collection_path):
        return True
    of_a_browser = collection_path == REPO / "tests" / "browser" and os.environ.get("FORGE_BROWSER") != "1"
    return True if of_a_gpu or of_a_browser else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU, and leave out what is long; a long test named with `::` is skipped and says why."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    long = pytest.mark.skip(reason="long: run `make test-full`, or pytest --slow")
    leave_out = PROFILE != "full" and not config.getoption("--slow")
    named = any("::" in word for word in config.args)
    if "FORGE_ORDER" in os.environ:  # the same in all of xdist's processes
        random.Random(os.environ["FORGE_ORDER"]).shuffle(items)
    chosen, left_out = [], []
    for item in items:
        is_long = leave_out and item.get_closest_marker("slow")
        if is_long and named:
            item.add_marker(long)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        (left_out if is_long and not named else chosen).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def pytest_report_header(config: pytest.Config) -> list[str]:
    all_run = PROFILE == "full" or config.getoption("--slow")
    return [] if all_run else ["tests marked slow are left out; `make test-full`, or pytest --slow, runs them too"]


def pytest_collection_finish() -> None:
    """Commands that tests start are forked from a process in which no test has run."""
    gc.freeze()
    gc.enable()
    forked.prepare()


def pytest_unconfigure() -> None:
    forked.release()


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture
def caplog(request: pytest.FixtureRequest) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's own, for tests that ask for it: its plugin `logging`, which is switched off, listens to every test, at
    45 loggers of torch, in all three phases."""
    request.node.stash[caplog_handler_key] = handler = LogCaptureHandler()
    with catching_logs(handler):
        fixture = pytest.LogCaptureFixture(request.node, _ispytest=True)
        yield fixture
        fixture._finalize()


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ran before a test makes no difference to it. One fixture for all of it: each costs a quarter of a
    millisecond, six thousand times.

    - In the quick profile a test draws the same random numbers every time.
    - Tests compare bits with plain loops on the CPU, so "auto" means the CPU, except where a test is about a GPU.
    - Such tests collect no garbage: of an earlier test, during the capture of a CUDA graph, it would break torch's
      allocator of pinned memory (see forge_plugins/cuda_graph/graph.py).
    - A strategy joins once for the life of its process; tests that follow begin without.
    """
    if PROFILE == "quick":
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    on_a_gpu = request.node.get_closest_marker("gpu") is not None
    if on_a_gpu:
        gc.collect()
        gc.disable()
    else:
        monkeypatch.setattr(forge.env, "auto_device", lambda: "cpu")
    yield
    if on_a_gpu:
        gc.enable()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def new_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Empty folders; pytest's own `mktemp` looks through all earlier ones for the next number."""
    root = tmp_path_factory.mktemp("tests")
    folders = (root / str(number) for number in itertools.count())
    return (folder for folder in folders if folder.mkdir() is None)


@pytest.fixture
def tmp_path(new_folders: Iterator[Path]) -> Path:
    """As pytest's."""
    return next(new_folders)


@pytest.fixture(autouse=True)
def empty_folder(new_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test stands in an empty folder of its own, so that no run is written into the checkout."""
    folder = next(new_folders)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def small_data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of data, made once; `small_data` tells recipes of it."""
    return write_small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def small_data(small_data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data in the layout that recipes look for, small, and FORGE_DATA set to it."""
    monkeypatch.setenv("FORGE_DATA", str(small_data_folder))
    return small_data_folder


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """What earlier modules imported is never garbage: a collection in this one does not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def syncs_are_errors() -> Iterator[forge.Plugin]:
    """A callback that makes every host sync an error from the second update on (the first batch is looked at)."""

    @forge.on("step_end")
    def strict(step: forge.Step) -> None:
        torch.cuda.set_sync_debug_mode("error")

    yield strict
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def run_python(empty_folder: Path) -> Run:
    """Run Python in a process of its own, away from the checkout: `run_python("-c", code, paths=[folder])`.

    `paths` come first on its import path; packages installed there are found, entry points included.
    """

    def run(*words: str, paths: Sequence[Path] = (), python: str | Path = sys.executable) -> Completed:
        inherited = filter(None, [os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited]),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            **PLAIN,
        }
        return subprocess.run(
            [python, *words], cwd=empty_folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )

    return run


@pytest.fixture
def run_forge(empty_folder: Path) -> Run:
    """Run the command line in a process of its own: `run_forge("fit", "quickstart")`.

    `paths` come first on its import path, as those of `run_python`.
    """
    return partial(forked.forge, env=PLAIN)
