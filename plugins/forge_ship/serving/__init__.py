"""Serving: a model behind HTTP, with requests computed in batches."""
