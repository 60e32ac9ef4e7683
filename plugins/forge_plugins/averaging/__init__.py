"""Plugins that average weights over a run."""
