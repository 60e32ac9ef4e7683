"""The recipes that ship with forge, and the tasks and data sets that they name.

A `.yaml` file in this package is a recipe, named by its file. Stack recipes (`default`, `fast`) name plugins only:
extend them, or use them with your own task (`forge fit my_task.py:MyTask --recipe fast`).
"""
