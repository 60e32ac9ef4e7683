"""Show runs in TensorBoard, on this machine, each under its own name."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import webbrowser
from argparse import ArgumentParser, Namespace
from pathlib import Path

from forge.errors import ForgeError
from forge.runs.find import RUNS, locate
from forge.runs.wording import counted
from forge.util import show
from forge_plugins.board.links import Links, base_of
from forge_plugins.board.server import serve

GROUP = "look"
EXAMPLES = """\
examples:
  forge board                                   every run in runs/, including new ones
  forge board runs/quickstart                   the runs of one recipe
  forge board runs/quickstart/A runs/other/B    two runs side by side
  forge board --port 6010 --no-open             print the address, open no browser
"""
REFRESH = 5.0
"""Seconds between two searches for new runs: TensorBoard's own interval for new points."""


def parser() -> ArgumentParser:
    parser = show.new_parser("board", "Show runs in TensorBoard, on this machine.", EXAMPLES)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="a run, or a folder of runs (default: runs)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 6006, or a free one if that is taken)")
    parser.add_argument("--host", default="localhost", help="0.0.0.0 admits other machines (default: localhost)")
    parser.add_argument("--no-open", action="store_true", help="print the address and open no browser")
    return parser


def run(args: Namespace) -> int:
    given = _folders(args.runs)
    with tempfile.TemporaryDirectory(prefix="forge-board-") as folder:
        links = Links(Path(folder), given, base_of(given))
        if not links.renew():
            where = ", ".join(map(str, given))
            raise ForgeError(
                f"No run in {where} was written for TensorBoard. "
                "Train with the plugin: forge fit quickstart -p tensorboard."
            )
        _interrupt_on_signals()
        try:
            address = serve(folder, args.host, args.port)
            show.console().print(f"TensorBoard shows {counted(len(links.names), 'run')} at {address}", soft_wrap=True)
            show.message("Ctrl-C ends it.", "dim")
            if not args.no_open and _has_display():
                webbrowser.open(address)
            while True:
                time.sleep(REFRESH)
                links.renew()
        except KeyboardInterrupt:
            return 0


def _folders(names: list[str]) -> list[Path]:
    """Return the folders to search; a name that is no folder may be a part of a run's name."""
    if not names and not Path(RUNS).is_dir():
        raise ForgeError(f"No folder {RUNS!r} here. Train first (forge fit quickstart), or name one: forge board RUN.")
    return [Path(name) if Path(name).is_dir() else locate(name).path for name in names or [RUNS]]


def _has_display() -> bool:
    """Return whether a browser can open a window; on a server reached by ssh it cannot."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _interrupt_on_signals() -> None:
    """Treat SIGTERM and a closed terminal like Ctrl-C, except where nohup ignores the signal."""
    for name in ("SIGTERM", "SIGHUP"):
        kind = getattr(signal, name, None)
        if kind is not None and signal.getsignal(kind) is not signal.SIG_IGN:
            signal.signal(kind, signal.default_int_handler)
