"""The address of rank 0, resolved before torch connects: a TCPStore retries an unknown name until it times
out, and prints a warning each time."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

from forge.errors import ForgeError

RESOLVE_LIMIT = 30.0
"""Seconds until a name that cannot be resolved ends the run: a name server may be restarting."""
_PAUSE = 1.0


def resolvable(address: str, environment: Mapping[str, str] = os.environ, limit: float = RESOLVE_LIMIT) -> str:
    """Return an address of rank 0's host that this host can resolve; raise a ForgeError after `limit` seconds.

    SLURM's name of a node need not be known to the resolver. Then the address that SLURM's own daemons use is taken,
    or the loopback address if all tasks are on one node. An address that the user has set is never replaced.
    """
    deadline = time.monotonic() + limit
    is_slurms = "SLURM_STEP_ID" in environment and not environment.get("MASTER_ADDR")
    while not _resolves(address):
        if is_slurms:
            known = "127.0.0.1" if _nodes(environment) == "1" else node_address(address)
            if known is not None and _resolves(known):
                return known
        if time.monotonic() + _PAUSE > deadline:
            raise ForgeError(_unknown(address, is_slurms, limit))
        time.sleep(_PAUSE)
    return address


def _unknown(address: str, is_slurms: bool, limit: float) -> str:
    whose = "SLURM calls the node of rank 0" if is_slurms else "MASTER_ADDR is"
    cure = (
        "Set MASTER_ADDR to an address of that node which all nodes can reach, before srun:\n"
        "  export MASTER_ADDR=$(srun --nodes=1 --ntasks=1 hostname --ip-address | cut -d' ' -f1)"
        if is_slurms
        else "Set it to an address of rank 0's host that all hosts can reach."
    )
    return f"{whose} {address!r}, which {socket.gethostname()} could not resolve for {limit:g} s. {cure}"


def _nodes(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "")


def _resolves(address: str) -> bool:
    try:
        return bool(socket.getaddrinfo(address, None))
    except OSError:
        return False


def own_address(endpoint: str) -> str | None:
    """Return this host's address on its way to HOST:PORT: other hosts find it even if no name server knows it.

    None if that way does not leave this host: its name is better then.
    """
    host, _, port = endpoint.rpartition(":")
    with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        address = probe.getsockname()[0]
        return None if address.startswith("127.") else address
    return None


def node_address(node: str) -> str | None:
    """Return the address at which SLURM itself reaches a node; None without `scontrol`."""
    try:
        words = ["scontrol", "--oneliner", "show", "node", node]
        said = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else None
