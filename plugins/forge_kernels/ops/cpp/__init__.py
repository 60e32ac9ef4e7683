"""Operators written in C++: :mod:`.finite` is the pattern, and :mod:`.build` compiles them at their first use."""
