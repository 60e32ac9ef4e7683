"""`forge validate`: measure weights on the validation split."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from forge.cli.evaluate import measure, measuring_parser


def parser() -> ArgumentParser:
    return measuring_parser("validate", "Measure weights on the validation split.")


def run(args: Namespace) -> int:
    return measure(args, "validate")
