from forge_kernels.testing import *  # noqa: F403  # read by type checkers, never run
