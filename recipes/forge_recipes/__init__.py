"""The recipes that ship with forge, and the tasks and data sets that they name.

A `.yaml` file in this package is a recipe and goes by its file name. Stack recipes (`default`, `fast`) name plugins
only: they are extended, or used with a task of one's own (`forge fit my_task.py:MyTask --recipe fast`).
"""
