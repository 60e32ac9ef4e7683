"""Two programs from one state, and where they part: record named points of each, and compare the records."""
