"""Recipes: YAML that names a task, its data, the Trainer's options and a stack of plugins. A recipe holds no logic.

::

    extends: [default]                         # applied left to right, each file once, then this one
    task: {name: digits_mlp, lr: 1e-3}         # names, never import paths
    data: {name: digits, batch_size: 64}
    trainer: {max_epochs: 10, seed: 42}
    plugins:                                   # merged by name, order kept
      one: {option: 1.0}
      two: null                                # null removes
      one@other: {option: 2.0}                 # the part after the @ labels a second instance

Every value has an origin: a file and line, the command line, Python, or a default. A recipe passes through these files,
in this order: `files` (finds it and its bases), `guard` (looks at its text, and notes the line of each key), `merge`
(layers and overrides), `references`, `schema` (types and defaults) and `recipe` (the Recipe itself). Between them
OmegaConf reads, merges and resolves the values.
"""

from forge.config.files import RecipeFile, list_recipes
from forge.config.recipe import Recipe, read_recipe

__all__ = ["Recipe", "RecipeFile", "list_recipes", "read_recipe"]
