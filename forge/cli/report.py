"""`forge report`: write one or several runs as one HTML page."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from forge.errors import ForgeError
from forge.runs.find import locate
from forge.util import show
from forge.util.files import atomic_write

EXAMPLES = """\
RUN is a run folder, a folder of runs (its newest), or a unique part of a run's name. The page needs no network and has
no script; a run in progress can be reported too.

examples:
  forge report runs/quickstart                          the newest run; writes report.html into its folder
  forge report runs/quickstart/RUN -o quickstart.html
  forge report RUN_A RUN_B -o compared.html             curves overlaid, and the differences
"""


def parser() -> ArgumentParser:
    parser = show.new_parser("report", "Write one or several runs as one HTML page.", EXAMPLES)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run; several are compared")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="file to write (default: RUN/report.html; for several: report.html)"
    )
    return parser


def run(args: Namespace) -> int:
    from forge.report.page import page

    runs = [locate(name) for name in args.runs]
    beside = runs[0].path if len(runs) == 1 else Path()
    file = Path(args.output) if args.output else beside / "report.html"
    if file.is_dir():
        raise ForgeError(f"-o {args.output} is a folder; name a file in it, as in {file / 'report.html'}.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, page(runs), is_named=bool(args.output))
    except OSError as error:
        raise ForgeError(
            f"The report cannot be written to {file}: {error.strerror}. Choose another file with -o."
        ) from error
    show.console().print(f"Wrote {show.near(file)}.", soft_wrap=True, markup=False)
    return 0


def _write(file: Path, text: str, is_named: bool) -> None:
    """Write the page. A file that the user named may be a pipe; one in the run folder is replaced, even if a link."""
    if is_named:
        file.write_text(text, encoding="utf-8", errors="replace")
        return
    with atomic_write(file) as beside:
        beside.write_text(text, encoding="utf-8", errors="replace")
