"""`forge test`: measure weights on the test split."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from forge.cli.evaluate import measure, measuring_parser


def parser() -> ArgumentParser:
    return measuring_parser("test", "Measure weights on the test split.")


def run(args: Namespace) -> int:
    return measure(args, "test")
