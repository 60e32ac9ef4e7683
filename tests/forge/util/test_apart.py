"""A copy of this process says what it has, hears what it is told, and ends when it is told to or by itself."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import pytest

from forge.util.apart import Copy, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="a process cannot be copied here")


def test_a_copy_hears_and_says() -> None:
    noted: list[int] = []

    def work(caller: Connection) -> None:
        noted.append(caller.recv())
        caller.send((noted, os.getpid()))

    copy = Copy(work)
    with pytest.raises(TimeoutError):
        copy.hear(0.0)
    copy.tell(7)
    assert copy.hear() == ([7], copy.process)
    assert noted == []
    with pytest.raises(EOFError):  # it has ended
        copy.hear()
    copy.tell("nobody hears it")
    copy.end()


def test_a_copy_ends_in_the_middle_of_its_work() -> None:
    copy = Copy(lambda caller: caller.recv())
    copy.end()
    with pytest.raises(EOFError):
        copy.hear()
    with pytest.raises(ChildProcessError):
        os.waitpid(copy.process, 0)


def test_a_copy_that_fails_does_not_return_to_the_program() -> None:
    def work(caller: Connection) -> None:
        raise RuntimeError("on purpose")

    copy = Copy(work)
    with pytest.raises(EOFError):
        copy.hear()
    copy.end()
