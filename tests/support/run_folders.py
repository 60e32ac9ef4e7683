"""Run folders written by hand, and what `forge runs` lists of them."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from forge.cli import main


def write_run(name: str, *lines: dict[str, Any], end: Any = None, card: Any = None, config: str = "") -> Path:
    """A run folder under runs/."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for stem, content in (("card", card), ("end", end)):
        if content is not None:
            (folder / f"{stem}.json").write_text(json.dumps(content))
    if config:
        (folder / "config.yaml").write_text(config)
    return folder


def card(day: int, **more: Any) -> dict[str, Any]:
    return {"started": f"2026-01-{day:02} 12:00:00 +0000", "recipe": "mine", "task": {"class": "Net"}, **more}


def write_group(name: str, values: dict[str, float], day: int = 1, planned: int = 0, **more: Any) -> Path:
    """A group with a finished run for each value of val/loss."""
    for i, (run, value) in enumerate(values.items()):
        described = card(day, trainer={"seed": i}, **more)
        described["task"] = {"class": "Net", "options": {"lr": 0.1 * day}}
        lines = [{"update": 5, "val/loss": 2 * value}, {"update": 10, "val/loss": value}]
        write_run(f"{name}/{run}", *lines, end={"status": "finished", "metrics": {"val/loss": value}}, card=described)
    home = Path("runs") / name
    names = [*values, *(f"seed-{i}" for i in range(len(values), planned))]
    content = {"command": f"forge fit {name}", "job": [name], "runs": {run: {"trainer.seed": 0} for run in names}}
    (home / "group.json").write_text(json.dumps(content))
    return home


def listed(*words: str) -> list[dict[str, Any]]:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["runs", *words, "--json"]) == 0
    return json.loads(out.getvalue())
