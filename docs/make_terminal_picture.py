"""Record `forge fit quickstart` in a terminal and write it as docs/pictures/terminal.svg.

    python docs/make_terminal_picture.py [FILE]

The picture shows the output on a terminal of 100 columns: the bars in the middle of the run, then its end.
"""

from __future__ import annotations

import io
import os
import pty
import re
import struct
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS = 100
COMMAND = ["fit", "quickstart", "--run-dir", "runs/quickstart/first"]
SHOWN = "forge fit quickstart"
REDRAWN = re.compile(r"\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
"""Start of a redraw: it erases the previous one."""
CURSOR = re.compile(r"\x1b\[\?25[lh]")
FONT = re.compile(r"@font-face\s*{.*?}\s*", re.DOTALL)
DARK, LIGHT = "#171a1f", "#dee2e6"
NORMAL = ("#3c424a", "#f07167", "#57c494", "#e2b252", "#569cde", "#c48cd2", "#4ebac4", "#dee2e6")
BRIGHT = ("#7a838e", "#ff8b80", "#6edcaa", "#f5cd6e", "#78b9f5", "#d8a0e6", "#69d2dc", "#ffffff")


WORKER = "import sys; sys.stdin.readline(); from forge.cli import main; sys.exit(main())"
"""Waits for a line, because the terminal has no size until then."""


def environment() -> dict[str, str]:
    """Return a terminal's environment, on the CPU. This Python's programs are on the path, so hints say `forge`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "TERM": "xterm-256color", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def rgb(code: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(code[1:])
    return red, green, blue


THEME = TerminalTheme(rgb(DARK), rgb(LIGHT), [rgb(code) for code in NORMAL], [rgb(code) for code in BRIGHT])


def record(words: list[str], folder: str) -> str:
    """Return what a forge command writes to a terminal."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, "-c", WORKER, *words], environment())
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    os.write(terminal, b"\n")
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        parts.append(part)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        sys.exit(b"".join(parts).decode())
    return b"".join(parts).decode().replace("\r\n", "\n")


def pictures(recorded: str) -> tuple[str, str]:
    """Return the screen in the middle of the run, and the screen at its end."""
    drawn = [CURSOR.sub("", part).strip("\n") for part in REDRAWN.split(recorded)]
    moving = [part for part in drawn[:-1] if "left" in part and "samples/s" in part and "val " in part]
    return moving[len(moving) // 2], drawn[-1]


def as_svg(middle: str, end: str) -> str:
    """Return the SVG, without the font that rich would load from a server."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text.assemble(("$ ", "bold green"), (SHOWN, "bold")))
    console.print(Text.from_ansi(middle), soft_wrap=True)
    console.print(Text(" ⋮", "bright_black"))
    console.print(Text.from_ansi(end), soft_wrap=True)
    svg = FONT.sub("", console.export_svg(title=SHOWN, theme=THEME, unique_id="forge"))
    return svg.replace("Fira Code", "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono")


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures" / "terminal.svg"
    with tempfile.TemporaryDirectory() as folder:
        svg = as_svg(*pictures(record(COMMAND, folder)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(svg, encoding="utf-8")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
