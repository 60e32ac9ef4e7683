"""Run folders: written, found, locked and compared."""
