"""Record what the checkout at hand writes, for `test_kept_runs.py`. The kept folders are those of commit 8164eb8:

    git worktree add ../then 8164eb8        # the checkout to record
    cp -r tests/truth ../then/tests/
    cd ../then && make install && .venv/bin/python -m tests.truth.record
    cp -r tests/truth/kept ../HERE/tests/truth/

Do not record newer code to make a test pass: that would make a loss the truth.

`kept/KIND/run` is a run that was cut (see kept_runs.py), and `kept/KIND/recorded.json` how the same run ended when
nothing cut it, and what commands say of the folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from forge import cli
from tests.truth import kept_runs

PASSING = {"path", "saved", "bytes", "size"}
"""What a command says of a file's place, age and size: these change when it is copied."""


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # outside a checkout, so that cards name none
        for kind in sys.argv[1:] or kept_runs.ALL:
            record_run(kind)


def record_run(kind: str) -> None:
    run, straight = Path(kind, "run"), Path("straight", kind).absolute()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["forge", *kept_runs.QUICKSTART] if kind == "quickstart" else ["train.py"]
        ended = kept_runs.ending(kind, straight)
        halfway = kept_runs.ending(kind, run.absolute(), cut=kept_runs.CUT)
    recorded = {"ended": ended, "halfway": halfway["weights"], "said": said_of(run)}
    kept = kept_runs.FOLDER / kind
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(run, kept / "run", symlinks=True, ignore=shutil.ignore_patterns(".lock"))
    (kept / "recorded.json").write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def said_of(run: Path) -> dict[str, Any]:
    """What commands say of a run folder, and the weights that one exports."""
    out = run.parent / "weights-of-ckpt-export.safetensors"
    say("ckpt", "export", str(run), str(out))
    return {
        "runs": lasting(json.loads(say("runs", str(run.parent), "--json"))),
        "checkpoints": lasting(json.loads(say("ckpt", "show", str(run), "--json"))),
        "checkpoint": lasting(json.loads(say("ckpt", "show", str(run / "checkpoints" / "latest"), "--json"))),
        "exported": kept_runs.weights_in(out),
    }


def say(*words: str) -> str:
    """Run a command, which must succeed, and return what it prints."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = cli.main(words)
    assert code == 0, f"forge {' '.join(words)} ended with {code}: {errors.getvalue()}{out.getvalue()}"
    return out.getvalue()


def lasting(value: Any) -> Any:
    """The same without what is true of one copy only."""
    if isinstance(value, dict):
        return {key: lasting(below) for key, below in value.items() if key not in PASSING}
    return [lasting(below) for below in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
