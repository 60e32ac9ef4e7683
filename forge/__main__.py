"""`python -m forge` is the command `forge`."""

import sys

from forge.cli import main

sys.exit(main())
