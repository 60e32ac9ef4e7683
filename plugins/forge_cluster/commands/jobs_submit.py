"""`forge jobs submit`: write a job as `forge launch` does, hand it to its scheduler, and remember it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from forge_cluster.commands import launch

GROUP = "scale"


def parser() -> ArgumentParser:
    parser = launch.parser()
    parser.prog = "forge jobs submit"
    return parser


def run(args: Namespace) -> int:
    args.submit = args.remember = True
    return launch.run(args)
