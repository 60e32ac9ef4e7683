import sys
from typing import TYPE_CHECKING

from forge.kernels import part

if TYPE_CHECKING:
    from forge_kernels.contract import *  # noqa: F403

sys.modules[__name__] = part("contract")  # the import system returns this entry
