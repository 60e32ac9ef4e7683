from forge_kernels.ops.cpp.build import *  # noqa: F403  # read by type checkers, never run
