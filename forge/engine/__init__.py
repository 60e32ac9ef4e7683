"""The engine: the Trainer, its sessions and the defaults of its actions."""
