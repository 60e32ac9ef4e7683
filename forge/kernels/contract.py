import sys

from forge.kernels import part

sys.modules[__name__] = part("contract")  # the import system returns this entry
