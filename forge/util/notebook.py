"""Whether this is a notebook."""

from __future__ import annotations

import sys
from typing import Any


def notebook_shell() -> Any:
    """Return IPython's shell if cells of a notebook run in it, else None; IPython is not imported for it."""
    module = sys.modules.get("IPython")
    found = module.get_ipython() if module is not None else None
    return found if found is not None and hasattr(found, "kernel") else None
