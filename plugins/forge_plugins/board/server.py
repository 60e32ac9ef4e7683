"""TensorBoard's server, in this process."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr

from forge.errors import ForgeError

POINTS = "scalars=10000,images=100,text=100"
"""Points kept of a curve, the last one included; TensorBoard's default is 1000, and 10 images."""


def serve(folder: str, host: str, port: int | None) -> str:
    """Serve the runs in a folder from a thread of its own, and return the address."""
    try:
        from tensorboard.program import TensorBoardServerException
    except ImportError as error:
        raise ForgeError(f"forge board needs TensorBoard ({error}): pip install tensorboard") from error
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    words = ["--logdir", folder, "--host", host, "--samples_per_plugin", POINTS, "--window_title", "forge board"]
    asked = [[]] if port is None else [["--port", str(port)]]
    free = [["--port", "0"]] if port is None else []  # TensorBoard alone tries 6006 and the next ten
    failure = ""
    for last in [*asked, *free]:
        try:
            return _launch([*words, *last])
        except TensorBoardServerException as error:
            failure = error.msg
    instead = f"Leave out --port {port} to use a free one." if port is not None else "Choose another --host."
    raise ForgeError(f"TensorBoard cannot listen on {host}: {failure.strip().rstrip('.')}. {instead}")


def _launch(words: list[str]) -> str:
    from tensorboard import default, program

    from forge_plugins.board.pages import PAGES

    board = program.TensorBoard([PAGES.get(plugin, plugin) for plugin in default.get_plugins()])
    with redirect_stderr(io.StringIO()):  # TensorBoard prints advice about its own build
        board.configure(argv=["", *words])
        return board.launch()
