"""A port for ranks to meet at."""

from __future__ import annotations

import random
import socket

BELOW_EPHEMERAL = range(20_000, 32_000)
"""The system gives these to nobody who asks for any port, or connects: one that it gave would soon be another's too."""


def free_port() -> int:
    draw = random.SystemRandom()  # seeds are the same in many processes
    while True:
        port = draw.choice(BELOW_EPHEMERAL)
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
