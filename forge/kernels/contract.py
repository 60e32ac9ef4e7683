from forge_kernels.contract import *  # noqa: F403  # read by type checkers, never run
