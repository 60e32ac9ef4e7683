"""Sweeps: try values of options in many runs, on one machine or several, and report the best.

::

    found = forge.sweep("quickstart", {"task.lr": "log(1e-4,1e-1)"}, metric="val/accuracy", trials=20)
    print(found.best.params, found.recipe)

`forge sweep RECIPE 'task.lr=log(1e-4,1e-1)' --metric val/accuracy` does the same from the command line.
"""
