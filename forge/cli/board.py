"""`forge board`: TensorBoard in the browser, for one run or many, each under its own name."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import webbrowser
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from forge.cli.board_links import Links, base_of
from forge.cli.board_server import serve
from forge.errors import ForgeError
from forge.runs.find import RUNS, locate
from forge.util import show

EXAMPLES = """\
examples:
  forge board                                   every run in runs/, new ones as they come
  forge board runs/quickstart                   the runs of one recipe
  forge board runs/quickstart/A runs/other/B    these two, side by side
  forge board --port 6010 --no-open             there, and only print the address
"""
LOOK_AGAIN = 5.0
"""Seconds from one look for new runs to the next: as often as TensorBoard looks for new points."""


def parser() -> ArgumentParser:
    parser = show.new_parser("board", "Look at runs with TensorBoard, on this machine.", EXAMPLES)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="a run, or a folder with runs in it (default: runs)")
    parser.add_argument("--port", type=int, help="where to listen (default: 6006, or a free one where that is taken)")
    parser.add_argument("--host", default="localhost", help="0.0.0.0 lets other machines look too (default: localhost)")
    parser.add_argument("--no-open", action="store_true", help="print the address and open no browser")
    return parser


def run(args: Namespace) -> int:
    given = _given(args.runs)
    with tempfile.TemporaryDirectory(prefix="forge-board-") as folder:
        links = Links(Path(folder), given, base_of(given))
        if not links.renew():
            where = ", ".join(map(str, given))
            raise ForgeError(
                f"There is nothing to show in {where}: no run there was written for TensorBoard. "
                "Train with the plugin: forge fit quickstart -p tensorboard."
            )
        _stop_when_asked()
        try:
            address = serve(folder, args.host, args.port)
            _tell(address, len(links.names))
            if not args.no_open and _has_display():
                webbrowser.open(address)
            while True:
                time.sleep(LOOK_AGAIN)
                links.renew()
        except KeyboardInterrupt:
            return 0


def _given(names: list[str]) -> list[Path]:
    """The folders to look into; what is no folder may be a part of a run's name."""
    if not names and not Path(RUNS).is_dir():
        raise ForgeError(
            f"There is no folder {RUNS!r} here. Train first (forge fit quickstart), or say where: forge board RUN."
        )
    return [Path(name) if Path(name).is_dir() else locate(name).path for name in names or [RUNS]]


def _tell(address: str, runs: int) -> None:
    console = show.console()
    console.print(f"TensorBoard shows {runs} run{'' if runs == 1 else 's'} at {address}", soft_wrap=True)
    show.message("Ctrl-C ends it.", "dim")


def _has_display() -> bool:
    """Whether a browser has somewhere to open; on a server reached by ssh it has not."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _stop_when_asked() -> None:
    """End as by Ctrl-C when the process is asked to, or its terminal is closed; not where nohup keeps that from it."""
    for name in ("SIGTERM", "SIGHUP"):
        kind = getattr(signal, name, None)
        if kind is not None and signal.getsignal(kind) is not signal.SIG_IGN:
            signal.signal(kind, _stop)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt
