"""The former place of the package that exports, whose documented modules are found here too, with a warning."""
