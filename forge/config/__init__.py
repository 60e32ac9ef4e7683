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

Every value has an origin: a file and line, the command line, or a default. A recipe passes through four files, in this
order: `files` (YAML and line numbers), `merge` (layers and overrides), `schema` (types and defaults) and `recipe` (the
Recipe itself).
"""

from forge.config.files import RecipeFile, list_recipes
from forge.config.recipe import Recipe, load_recipe, read_recipe

__all__ = ["Recipe", "RecipeFile", "list_recipes", "load_recipe", "read_recipe"]
