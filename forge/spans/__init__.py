"""One line of spans: what phases, hooks and plugins of a run take, written once and read by all that tells times."""
