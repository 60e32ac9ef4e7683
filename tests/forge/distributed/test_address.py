"""The address of rank 0: a name that nobody can resolve ends the run with the cure, and never in endless retries."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from forge.distributed import address, join
from forge.distributed.address import resolvable
from forge.distributed.rank_info import RankInfo
from forge.errors import ForgeError

NODE = "no-such-node.invalid"
"""A name that no resolver knows: RFC 6761 reserves `.invalid`."""
STEP = {"SLURM_STEP_ID": "0", "SLURM_NNODES": "2"}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `scontrol` that knows a node by its address, as the real one prints it."""
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho 'NodeName=n1 Arch=aarch64 NodeAddr=127.0.0.1 NodeHostName=h Port=17001'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return program


def test_an_address_that_resolves_is_taken_as_it_is() -> None:
    assert resolvable("127.0.0.1", {}) == "127.0.0.1"
    assert resolvable("localhost", STEP) == "localhost"


def test_a_step_on_one_node_meets_at_the_loopback_address() -> None:
    assert resolvable(NODE, {**STEP, "SLURM_STEP_NUM_NODES": "1"}) == "127.0.0.1"


@pytest.mark.usefixtures("scontrol")
def test_a_node_is_reached_at_the_address_slurm_uses() -> None:
    assert resolvable(NODE, STEP) == "127.0.0.1"


def test_an_unknown_node_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "node_address", lambda node: None)
    with pytest.raises(ForgeError, match=rf"(?s){NODE}.*{socket.gethostname()}.*export MASTER_ADDR="):
        resolvable(NODE, STEP, limit=0)


@pytest.mark.usefixtures("scontrol")
def test_an_address_of_the_user_is_never_replaced() -> None:
    with pytest.raises(ForgeError, match=f"MASTER_ADDR is '{NODE}'"):
        resolvable(NODE, {**STEP, "SLURM_STEP_NUM_NODES": "1", "MASTER_ADDR": NODE}, limit=0)


def test_a_name_server_that_comes_back_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(address, "_resolves", lambda name: next(answers))
    monkeypatch.setattr(address, "_PAUSE", 0.0)
    assert resolvable("node1", {}) == "node1"
    assert next(answers, None) is None


def test_a_rank_that_joins_raises_the_message_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolvable, "__defaults__", (os.environ, 0.0))
    with pytest.raises(ForgeError, match=f"^MASTER_ADDR is '{NODE}'"):
        join._init(RankInfo(1, 2, 1, NODE, 29400), torch.device("cpu"), "gloo")
