"""The probes of `forge doctor`: each takes a Patient, works on copies of its task, and yields findings."""
