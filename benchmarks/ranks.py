"""Ranks over gloo, one thread each, that call a function."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.support.free_port import free_port

HEAVY = ["benchmarks.meshes_by_hand", "torch._dynamo", "torchvision.models"]
HEAVY += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2")]
"""What is imported once, before ranks are forked: with eight of them on two cores imports took longer than runs."""


def on_ranks(function: Callable[..., Any], world: int, *arguments: Any, join: bool = False) -> Any:
    """Call a function on ranks that find torchrun's variables, and have joined if asked; return rank 0's result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    found = context.SimpleQueue()
    given = free_port(), world, function, arguments, join, found
    multiprocessing.start_processes(_rank, given, nprocs=world, start_method="forkserver")
    return found.get()


def _rank(rank: int, port: int, world: int, function: Any, arguments: Any, join: bool, found: Any) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}})
    torch.set_num_threads(1)
    if join:
        dist.init_process_group("gloo")
    result = function(*arguments)
    if rank == 0:
        found.put(result)
    if join:
        with suppress(RuntimeError):
            dist.destroy_process_group()
