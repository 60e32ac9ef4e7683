"""`forge serve`: answer requests to a model over HTTP."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.cli import target
from forge.errors import ForgeError
from forge.util import show

GROUP = "ship"
AFTER = "bench"
EXAMPLES = """\
examples:
  forge serve runs/quickstart/A                       the best weights of a run
  forge serve model.onnx --port 0                     an exported file, on a free port
  forge serve model.pt2 --max-batch 64 --max-wait 5   larger batches, a longer wait

It answers POST /predict, GET /health, GET /ready, GET /metrics and GET /v1/model; docs/serving.md describes them.
"""
LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


def _number(kind: Callable[[str], Any], least: float, most: float = float("inf")) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most or value == float("inf"):
            upper = "" if most == float("inf") else f" and at most {most:g}"
            raise ArgumentTypeError(f"{text!r} must be a number, at least {least:g}{upper}")
        return value

    return parse


LIMITS: tuple[tuple[str, str, Callable[[str], Any], float, str], ...] = (
    ("--max-batch", "ROWS", _number(int, 1), 32, "rows of a batch, and of one request"),
    ("--max-wait", "MS", _number(float, 0), 2.0, "longest wait for a batch to fill, in milliseconds"),
    ("--max-body", "MIB", _number(float, 0), 16.0, "size of a request, in MiB"),
    ("--queue", "N", _number(int, 1), 256, "requests that may wait for the model; more get a 429"),
    ("--max-connections", "N", _number(int, 1), 512, "connections that may be open"),
    ("--timeout", "S", _number(float, 0.001), 20.0, "seconds for a request, and for the end after a signal"),
)
"""Options that are numbers: what they count in, how they are read, the default, and what they limit."""


def parser() -> ArgumentParser:
    parser = show.new_parser("serve", "Answer requests to a model over HTTP, computed in batches.", EXAMPLES)
    parser.add_argument(
        "model", metavar="RUN|FILE", help="a run folder, a checkpoint in one (RUN:best), or an exported model"
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 admits other machines (default: %(default)s)")
    parser.add_argument("--port", type=_number(int, 0, 65535), default=8000, help="0 picks one (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where the model runs (default: %(default)s)")
    parser.add_argument("--task", metavar="FILE.py:Task", help="the task of a run, or a function that makes it")
    parser.add_argument(
        "--data",
        metavar="FILE.py:function",
        help="the data of a run, if they are neither installed by name nor `data` in the task's file",
    )
    parser.add_argument("--weights", metavar="WHICH", help="weights of a run: raw, ema, swa or best")
    for flag, unit, number, default, text in LIMITS:
        told = f"{text} (default: %(default)g)"
        parser.add_argument(flag, metavar=unit, type=number, default=default, help=told)
    parser.add_argument(
        "--host-header",
        metavar="NAME",
        type=lambda text: text.split(","),
        action="extend",
        help="names that requests may call the server by: example.com, *.example.com or *, several with commas "
        "(default: those of this machine, with --host: *)",
    )
    parser.add_argument(
        "--max-axis",
        metavar="NAME=N",
        type=_axis,
        action="append",
        default=[],
        help="largest size of a dynamic axis (default: the largest in the data)",
    )
    parser.add_argument(
        "--threads", metavar="N", type=_number(int, 1), help="threads of torch's operators (default: torch's choice)"
    )
    parser.add_argument("--no-warmup", action="store_true", help="compute no zeros before the first request")
    return parser


def run(args: Namespace) -> int:
    import torch

    try:
        from forge_ship.serving.http_answers import make_app
        from forge_ship.serving.server_process import address_of, listen, serve
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    from forge_ship.open_engine import open_engine
    from forge_ship.serving.batcher import can_batch
    from forge_ship.serving.limits import MIB, ServeLimits

    limits = ServeLimits(
        max_batch=args.max_batch,
        max_wait=args.max_wait / 1000,
        max_body=int(args.max_body * MIB),
        queue=args.queue,
        max_connections=args.max_connections,
        timeout=args.timeout,
        max_axes=dict(args.max_axis),
    )
    bound = listen(args.host, args.port)
    if args.threads is not None:
        torch.set_num_threads(args.threads)  # before the engine's thread starts: it takes the number from here
    try:
        task, data = target.task_and_data(args)
        engine = open_engine(args.model, device=args.device, task=task, weights=args.weights, data=data)
        kind = getattr(engine, "format", "") or Path(args.model).suffix.removeprefix(".")
        name = os.path.basename(os.path.abspath(args.model))  # the folders above it are nobody's business
        hosts = args.host_header or (LOCAL if args.host in LOCAL else ["*"])
        app = make_app(engine, limits, name=name, kind=kind, warmup=not args.no_warmup, hosts=hosts)
        if args.host not in LOCAL:
            show.warning(f"{args.host} admits other machines, and requests are not authenticated: see docs/serving.md.")

        def announce() -> None:
            together = "" if can_batch(engine) else " (one request at a time: an input or output has no axis batch)"
            show.console().print(
                f"Serving {args.model} at {address_of(bound)}: batches of up to {limits.max_batch} rows, "
                f"waiting at most {args.max_wait:g} ms{together}",
                soft_wrap=True,
            )

        answered = serve(app, bound, announce)
    finally:
        bound.close()
    show.message("stopped" if answered else "stopped; requests in flight were dropped", "dim")
    return 0 if answered else 1


def _missing(error: ModuleNotFoundError) -> ForgeError:
    from forge_ship.engine import ExportError

    return ExportError(f"forge serve needs {error.name}: pip install 'forge-trainer[serve]'")


def _axis(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not name or not size.isdecimal() or int(size) < 1:
        raise ArgumentTypeError(f"{text!r} must be NAME=N, as in length=512")
    return name, int(size)
