"""The hash by which files of a checkpoint are verified."""

from __future__ import annotations

import hashlib

new_hash = hashlib.sha256
"""Begin a hash: `new_hash(bytes)`, `.update(more)`, `.hexdigest()`. The manifest calls it by its name, sha256."""
