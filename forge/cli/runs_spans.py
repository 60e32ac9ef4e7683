"""`forge runs spans`: where the time of a run went, after the run or while it trains."""

from __future__ import annotations

import json
from pathlib import Path

from rich.text import Text

from forge.errors import ForgeError
from forge.runs.folder import RunFolder, as_dict
from forge.spans import file, goodput, told
from forge.util import show


def spans_of(run: RunFolder, perfetto: str | None, as_json: bool) -> int:
    """Print what RUN/spans.json has; write the trace of RUN/spans.jsonl, if that is asked for."""
    spent, hooks = goodput.spent(run.spans), as_dict(run.spans.get("hooks"))
    if spent is None:
        raise ForgeError(f"{run.path} has no {goodput.FILE}: train with the recipe default, or with its plugin.")
    if perfetto is not None:
        return _write_trace(run, Path(perfetto))
    if as_json:
        print(json.dumps({"goodput": spent.as_json(), **{k: v for k, v in run.spans.items() if k != "attempts"}}))
        return 0
    console = show.console()
    console.print(Text(f"In updates that count: {spent.sentence()}."), soft_wrap=True)
    grid = show.table("part", "time", "share")
    for row in spent.rows():
        grid.add_row(*row)
    console.print(grid)
    for text in (run.spans.get("rates"), run.spans.get("verdict"), hooks and told.as_text(hooks)):
        if isinstance(text, str) and text:
            console.print()
            console.print(Text(text), soft_wrap=True)
    if not hooks:
        console.print(Text("Phases, the cost of each plugin and a verdict: train with hooks=true.", "dim"))
    return 0


def _write_trace(run: RunFolder, path: Path) -> int:
    found = file.trace(run.path)
    if not found["traceEvents"]:
        raise ForgeError(
            f"{run.path} has no {file.NAME.format('')}: train with file=true of the plugin that records it."
        )
    path.write_text(json.dumps(found))
    show.message(f"{path}: {len(found['traceEvents']):,} events. Open it at https://ui.perfetto.dev")
    return 0
