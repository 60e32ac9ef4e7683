"""checkpoint.remote: what is uploaded and kept, what an empty machine resumes from, and what a failure leaves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.checkpoint import Checkpoints, StoredCheckpoint
from forge.checkpoint.weights import read_weights
from forge.errors import CheckpointError, RecipeError
from forge.testing import assert_same
from forge_cluster.storage import object_storage
from forge_cluster.storage.mirror import Mirror
from forge_cluster.storage.object_storage import redacted
from forge_cluster.storage.remote import RemoteCheckpoints
from forge_plugins.checkpoint import Checkpoint
from tests.support import limited
from tests.support.flaky_storage import FlakyFileSystem
from tests.support.profiles import some
from tests.support.tasks import Classifier, fit, make_batches

PLACE = "flaky://bucket/runs/first"
UPDATES = 6


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FlakyFileSystem.reset()
    monkeypatch.setattr(object_storage, "FIRST_PAUSE", 0.0)
    yield
    FlakyFileSystem.reset()


class Dropping(Classifier):
    """Draws random numbers, so that only the very same course ends in the same weights."""

    def training_step(self, batch: Any) -> Any:
        return super().training_step((torch.nn.functional.dropout(batch[0], 0.3), batch[1]))

    validation_step = Classifier.training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def train(run: Path, updates: int = UPDATES, url: str = PLACE, resume: Any = "auto", **options: Any) -> Classifier:
    """Fit with a checkpoint after every update, two of them kept."""
    plugin = Checkpoint(**{"every": "1 updates", "keep": 2, "remote": url, **options})
    torch.manual_seed(3)
    task = Dropping()
    fit(
        task,
        make_batches(4),
        max_epochs=None,
        max_updates=updates,
        seed=1,
        run_dir=run,
        plugins=[plugin],
        resume=resume,
    )
    return task


def there(url: str = PLACE) -> list[int]:
    """The updates whose checkpoints are complete; of those that followed quickly some are passed over."""
    place = RemoteCheckpoints(url)
    return [update for update in place.updates() if place.manifest(update) is not None]


def failing(*numbers: int, error: Exception | None = None) -> Callable[[int, str, str], None]:
    def plan(number: int, operation: str, path: str) -> None:
        if number in numbers:
            raise error or OSError("503 Slow Down")

    return plan


def dead_from(first: int) -> Callable[[int, str, str], None]:
    """From this call on nothing reaches the storage: what the process would have done after a kill."""

    def plan(number: int, operation: str, path: str) -> None:
        if number >= first:
            raise PermissionError("the process is dead")

    return plan


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    return train(tmp_path_factory.mktemp("straight"), url="memory://straight/run", resume=None)


# -- what is there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", some(["file", "memory", "flaky"], quick=1))
def test_what_is_kept_is_uploaded(scheme: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store" if scheme == "file" else f"{scheme}://bucket/{tmp_path.name}"
    train(tmp_path / "run", url=url)
    assert there(url)[-2:] == [5, 6]
    local = Checkpoints(tmp_path / "run/checkpoints")
    for update in (5, 6):
        RemoteCheckpoints(url).fetch(update, tmp_path / "again" / f"update-{update:08d}")
        StoredCheckpoint(tmp_path / "again" / f"update-{update:08d}").verify()
        names = sorted(path.name for path in local.path(update).iterdir())
        assert [(local.path(update) / name).read_bytes() for name in names] == [
            (tmp_path / "again" / f"update-{update:08d}" / name).read_bytes() for name in names
        ]


def test_the_manifest_is_the_last_to_come_and_nothing_is_removed(tmp_path: Path) -> None:
    train(tmp_path / "run", updates=4)
    names = [(operation, *path.split("/")[-2:]) for operation, path in FlakyFileSystem.calls]
    assert there()[-2:] == [3, 4]
    for update in (f"update-{number:08d}" for number in there()):
        writes = [name for operation, folder, name in names if folder == update and operation.endswith("t_file")]
        writes += [name for operation, folder, name in names if folder == update and operation == "pipe_file"]
        assert writes == ["state.json", "model.safetensors", "state.safetensors", "manifest.json"]
    assert not [name for name in names if name[0] == "rm_file"]


def test_an_abandoned_course_no_longer_counts(tmp_path: Path) -> None:
    train(tmp_path / "run", updates=3, keep="all")
    place = RemoteCheckpoints(PLACE)
    place.withdraw(2)  # as after a rewind to update 1: the new update 2 is not there yet
    assert there()[-1] == 3
    mirror = Mirror(place, Checkpoints(tmp_path / "run/checkpoints"))
    mirror.hold([1, 2])
    mirror.close()
    assert there() == [1, 2]
    assert place.updates() == [1, 2, 3]


# -- an empty machine -------------------------------------------------------------------------------------------------


def test_without_a_run_folder_the_run_is_fetched_into_one(
    tmp_path: Path, straight: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "elsewhere", updates=3)
    resumed = train(None)  # pyright: ignore[reportArgumentType]
    assert_same(resumed, straight)
    (folder,) = (tmp_path / "runs/dropping").iterdir()
    assert json.loads((folder / "card.json").read_text())["resumed_from"] == 3


def test_what_is_newer_here_is_not_fetched(tmp_path: Path, straight: Classifier) -> None:
    train(tmp_path / "run", updates=2)
    FlakyFileSystem.plan = dead_from(len(FlakyFileSystem.calls) + 6)
    train(tmp_path / "run", updates=4, on_failure="warn")
    FlakyFileSystem.plan = None
    FlakyFileSystem.calls.clear()
    assert_same(train(tmp_path / "run"), straight)
    assert not [path for operation, path in FlakyFileSystem.calls if operation == "get_file"]
    assert there()[-2:] == [5, 6]


def test_a_damaged_one_is_skipped_for_the_one_before(
    tmp_path: Path, straight: Classifier, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "one", updates=4)
    path = "/bucket/runs/first/update-00000004/model.safetensors"
    file = FlakyFileSystem.store[path]
    data = bytearray(file.getvalue())
    data[-3] ^= 1
    file.seek(0)
    file.write(bytes(data))
    with caplog.at_level(logging.WARNING, "forge"):
        resumed = train(tmp_path / "two")
    assert_same(resumed, straight)
    assert "update-00000004/model.safetensors is damaged" in caplog.text
    assert json.loads((tmp_path / "two/card.json").read_text())["resumed_from"] == 3


def test_the_best_come_along(tmp_path: Path) -> None:
    class Scores(Dropping):
        def evaluation_end(self, stage: str) -> dict[str, Any]:
            return {"score": float(-self.trainer.progress.update)}

    def best(run: Path, updates: int) -> None:
        plugin = Checkpoint(every="1 updates", keep=1, best={"monitor": "val/score", "mode": "max"}, remote=PLACE)
        options: dict[str, Any] = {"max_updates": updates, "max_epochs": None, "seed": 1, "run_dir": run}
        fit(
            Scores(),
            make_batches(1),
            make_batches(1),
            plugins=[plugin],
            resume="auto",
            validate_every="1 updates",
            **options,
        )

    best(tmp_path / "one", 3)
    assert {1, 3} <= {*there()}
    best(tmp_path / "two", 5)
    assert {1, 5} <= {*there()}
    assert StoredCheckpoint.find(tmp_path / "two/checkpoints/best").update == 1


# -- failures ---------------------------------------------------------------------------------------------------------


def test_single_failures_are_tried_again(tmp_path: Path, straight: Classifier) -> None:
    FlakyFileSystem.plan = failing(*range(0, 400, 2))
    FlakyFileSystem.tears = True
    assert_same(train(tmp_path / "run"), straight)
    assert there()[-2:] == [5, 6]


def test_an_outage_is_made_good_by_the_next_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def plan(number: int, operation: str, path: str) -> None:
        if "update-00000001/model" in path:
            raise PermissionError("not now")

    FlakyFileSystem.plan = plan
    with caplog.at_level(logging.ERROR, "forge"):
        train(tmp_path / "run", updates=4)
    FlakyFileSystem.plan = None
    assert there()[-2:] == [3, 4]


def test_a_failure_at_the_end_fails_the_run_or_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def plan(number: int, operation: str, path: str) -> None:
        if "manifest" in path and operation == "pipe_file":
            raise PermissionError("read only")

    FlakyFileSystem.plan = plan
    with pytest.raises(CheckpointError, match=r"read only.*They are complete in"):
        train(tmp_path / "stop", updates=2)
    assert [path.name[-1] for path in Checkpoints(tmp_path / "stop/checkpoints").all()] == ["1", "2"]
    train(tmp_path / "warn", updates=2, on_failure="warn")
    assert "read only" in caplog.text
    assert there() == []
    FlakyFileSystem.plan = None
    train(tmp_path / "stop", updates=2)  # already complete: nothing is trained
    assert there() == [1, 2]


def test_a_place_that_cannot_be_written_refuses_the_start(tmp_path: Path) -> None:
    FlakyFileSystem.plan = failing(*range(99), error=PermissionError("AccessDenied"))
    with pytest.raises(CheckpointError, match="AccessDenied"):
        train(tmp_path / "run")


def test_an_outage_on_resume_starts_no_new_run(tmp_path: Path) -> None:
    train(tmp_path / "one", updates=2)
    FlakyFileSystem.plan = failing(*range(len(FlakyFileSystem.calls), 999))
    with pytest.raises(CheckpointError, match="could not list"):
        train(tmp_path / "two")
    assert not (tmp_path / "two/card.json").exists()


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How often a whole run calls the storage."""
    FlakyFileSystem.reset()
    train(tmp_path_factory.mktemp("calls"))
    return len(FlakyFileSystem.calls)


@given(share=st.floats(0, 1), tears=st.booleans())
def test_a_kill_at_any_call_resumes_in_the_same_bits(
    share: float, tears: bool, calls: int, straight: Classifier, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The storage stays as it was at the kill; a machine that has nothing else ends as if nothing had happened."""
    FlakyFileSystem.reset()
    FlakyFileSystem.plan, FlakyFileSystem.tears = dead_from(int(share * calls)), tears
    folder = tmp_path_factory.mktemp("killed")
    with suppress(CheckpointError):  # at the start, or of the last upload; what matters is what is there
        train(folder / "one")
    FlakyFileSystem.plan = None
    complete = there()
    resumed = train(folder / "two")
    assert_same(resumed, straight)
    card = json.loads((folder / "two/card.json").read_text())
    assert card["resumed_from"] == (complete[-1] if complete else None)
    assert there()[-1] == UPDATES


# -- refusals and secrets ---------------------------------------------------------------------------------------------


def test_a_place_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train(tmp_path / "one", updates=2)
    with pytest.raises(CheckpointError, match=r"already holds the checkpoints of a run \(up to update 2\)"):
        train(tmp_path / "two", resume=None)


def test_another_job_is_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path / "one", updates=2)
    plugin = Checkpoint(every="1 updates", remote=PLACE)
    with pytest.raises(
        CheckpointError, match=r"flaky://bucket/runs/first holds another job: task.hidden was 8 and is 4"
    ):
        fit(Dropping(hidden=4), run_dir=tmp_path / "two", plugins=[plugin], resume="auto", seed=1)


def test_run_in_the_url_is_the_name_of_the_run_folder(tmp_path: Path) -> None:
    train(tmp_path / "alpha", updates=1, url="flaky://bucket/all/{run}")
    train(tmp_path / "beta", updates=2, url="flaky://bucket/all/{run}")
    assert there("flaky://bucket/all/alpha") == [1]
    assert there("flaky://bucket/all/beta")[-1] == 2


@pytest.mark.parametrize(
    "url", ["s3://key:hunter22@bucket/x", "s3://bucket/x?secret=hunter22", "https://user@host/x", "gs://b/x#hunter22"]
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(RecipeError, match="credentials and queries do not belong") as caught:
        Checkpoint(remote=url)
    assert "hunter22" not in str(caught.value).replace("#hunter22", "")


BAD = {
    "an empty place": "s3:///x",
    "a line break": "s3://bucket/x\ny",
    "a part of dots": "s3://bucket/../other",
    "a chain": "simplecache::s3://bucket/x",
    "long": "s3://bucket/" + "n/" * 600,
    "an unknown scheme": "nope://bucket/x",
    "half an address": "http://[::1/x",
    "a folder in a file": "file:///dev/null/x/y",
    "no scheme": "://bucket/x",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_url_is_one_line_within_a_second(name: str) -> None:
    done = limited.call(partial(_open, BAD[name]))
    assert done.returncode == 2, done.stderr


def _open(url: str) -> int:
    for act in (lambda: Checkpoint(remote=url) and RemoteCheckpoints(url).names(), lambda: read_weights(url)):
        with pytest.raises(forge.ForgeError) as caught:
            act()
        assert len(str(caught.value).splitlines()) == 1
    return 2


def test_secrets_reach_no_file_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    said = "GET https://AKIA:wJalrXUtnFEMI@host/b?X-Amz-Signature=abc123 with wJalrXUtnFEMI"

    def plan(number: int, operation: str, path: str) -> None:
        if "update-" in path and operation == "put_file":
            raise PermissionError(said)

    FlakyFileSystem.plan = plan
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "run", updates=2)
    texts = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert b"GET https://***@host/b?***" in b"".join(texts)  # the reason is in end.json
    for secret in ("wJalrXUtnFEMI", "abc123", "AKIA"):
        assert secret not in str(caught.value)
        assert not [text for text in texts if secret.encode() in text]
    assert redacted(said) == "GET https://***@host/b?*** with ***"


def test_a_missing_package_is_named() -> None:
    with pytest.raises(CheckpointError, match="needs a package that is not installed"):
        RemoteCheckpoints("oci://bucket/x")


def test_without_remote_the_plugin_wraps_nothing() -> None:
    assert Checkpoint().forge_setup_env is None
    assert Checkpoint(remote=PLACE).forge_setup_env is not None
    assert isinstance(forge.Trainer(plugins=[Checkpoint(remote=PLACE)]), forge.Trainer)
