"""The contract: hooks, plugins, the stack, the task, the step and the run, as every other room knows them."""
