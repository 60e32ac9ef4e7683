"""What torch's flight recorder knows of a rank, in words and as files; which settings a stall report shows."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge.distributed import flight_recorder, stall_report
from tests.forge.distributed.test_failures import dumped
from tests.support.lasting_ranks import ranks
from tests.support.patience import PATIENCE


def entry(name: str, number: int, done: bool, created: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "profiling_name": name,
        "collective_seq_id": number,
        "process_group": ["7", "mine"],
        "input_sizes": [[3, 4], []],
        "state": "scheduled",
        "retired": done,
        "time_created_ns": created,
        **more,
    }


def test_a_rank_is_where_it_first_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder.time, "time_ns", lambda: 12 * 10**9)
    done, waits = entry("gloo:all_reduce", 41, True), entry("nccl:_all_gather_base", 42, False, 2 * 10**9)
    later = entry("gloo:all_reduce", 43, False, 3 * 10**9)
    told = "waits in _all_gather_base of 3x4, one number, number 42 of 7, for 10 s"
    assert flight_recorder.position([done, waits, later]) == told
    last = "waits in no collective; its last one was all_reduce of 3x4, one number, number 41 of 7"
    assert flight_recorder.position([done]) == last
    assert flight_recorder.position([]) == "has no record of its collectives"


def test_messages_between_two_ranks_have_their_own_numbers() -> None:
    sent = entry("nccl:send 0->1", 5, True, is_p2p=True, p2p_seq_id=9)
    assert flight_recorder.where(sent) == "send 0->1 of 3x4, one number, number 9 of 7"


def test_a_completed_collective_is_done_before_it_is_retired() -> None:
    assert flight_recorder.is_done(entry("nccl:all_reduce", 1, False, state="completed"))
    assert not flight_recorder.is_done(entry("nccl:all_reduce", 1, False, state="started"))


def test_the_recorder_is_on_unless_the_user_set_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, size in ((None, "2000"), ("0", "0")):
        monkeypatch.delenv(flight_recorder.SIZE_VARIABLE, raising=False)
        if given is not None:
            monkeypatch.setenv(flight_recorder.SIZE_VARIABLE, given)
        flight_recorder.switch_on()
        assert os.environ[flight_recorder.SIZE_VARIABLE] == size


def test_settings_are_those_of_communication_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = flight_recorder.settings()
    assert found["NCCL_DEBUG"] == "INFO"
    assert found["torch"] == torch.__version__
    assert "secret" not in json.dumps(found)


def test_settings_that_differ_between_ranks_are_named() -> None:
    one, two = dumped({}, torch="2.15", NCCL_SOCKET_IFNAME="eth0"), dumped({}, torch="2.15")
    text = stall_report.stall_report({0: one, 1: two}, "Stalled.")
    assert "\nsettings: torch=2.15\n" in text
    assert "\nNCCL_SOCKET_IFNAME differs: eth0 on rank 0, not set on rank 1.\n" in text


def test_a_report_under_detail_does_not_clear_every_rank() -> None:
    plain = stall_report.stall_report({0: dumped({}), 1: dumped({})}, "Stalled.")
    detail = stall_report.stall_report({0: dumped({}, TORCH_DISTRIBUTED_DEBUG="DETAIL")}, "Stalled.")
    assert "none is missing" in plain
    assert "none is missing" not in detail
    assert "ranks wait for each other before a collective counts" in detail


def test_nccls_record_and_log_are_kept_beside_the_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = json.dumps({"entries": [entry("nccl:all_reduce", 1, False)]}).encode()
    for name, value in {
        "dump_nccl_json": recorded,
        "dump_nccl": b"torch's",
        "dump_gloo_json": b"{}",
    }.items():
        monkeypatch.setattr(flight_recorder, name, lambda value=value: value)
    (tmp_path / f"log.{os.getpid()}").write_text("NCCL INFO")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "log.%p"))
    flight_recorder.save(tmp_path / "stall", 3, {"main": ["a line"]})
    saved = {file.name: file.read_bytes() for file in (tmp_path / "stall").iterdir()}
    assert saved.keys() == {"rank3.json", "nccl_rank_3", "nccl_rank3.log"}
    assert saved["nccl_rank_3"] == b"torch's"
    assert saved["nccl_rank3.log"] == b"NCCL INFO"
    kept = json.loads(saved["rank3.json"])
    assert (kept["main"], kept["collectives"][0]["profiling_name"]) == (["a line"], "nccl:all_reduce")


def reduced() -> tuple[str, list[str]]:
    flight_recorder.switch_on()
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    end = time.monotonic() + PATIENCE
    while True:
        recorded = [e for e in flight_recorder.entries() if e["profiling_name"] == "gloo:all_reduce"]
        if flight_recorder.is_done(recorded[-1]) or time.monotonic() > end:  # gloo's own thread records the end later
            break
        time.sleep(0.01)
    return flight_recorder.where(recorded[-1]), flight_recorder.by_group(recorded)


def test_gloo_is_recorded_with_its_numbers() -> None:
    for last, groups in ranks(2)(reduced):
        assert last == "all_reduce of 4, number 3 of default"
        assert "all_reduce of 4, number 3 of default: done" in groups


def one_waits() -> dict[str, tuple[int, str]]:
    flight_recorder.switch_on()
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2, 3), async_op=True)
        found = flight_recorder.waits(flight_recorder.entries())
        store.set("looked", "1")
        work.wait()
        return found
    found = flight_recorder.waits(flight_recorder.entries())
    store.get("looked")
    dist.all_reduce(torch.ones(2, 3))
    return found


def test_a_rank_knows_what_it_waits_in() -> None:
    (waits,), none = ranks(2)(one_waits)[0].items(), ranks(2)(one_waits)[1]
    assert waits == ("0/0+2", (1, "all_reduce of 2x3"))
    assert none == {}


def test_sizes_are_compared_where_they_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_members", lambda: {"7": "0+2", "8": "0+2", "9": "2+2"})
    names = ("gloo:all_reduce", "nccl:all_to_all", "nccl:_all_gather_base")
    recorded = [entry(name, 3, False, process_group=[str(at), ""]) for at, name in enumerate(names, 7)]
    recorded += [entry("gloo:all_reduce", 4, False), entry("nccl:send 0->1", 1, False, is_p2p=True, p2p_seq_id=1)]
    assert flight_recorder.waits(recorded) == {
        "7/0+2": (3, "all_reduce of 3x4, one number"),
        "8/0+2": (3, "all_to_all"),
        "9/2+2": (3, "_all_gather_base of 3x4, one number"),
    }
