import sys

from forge.kernels import part

sys.modules[__name__] = part("testing")  # the import system returns this entry
