"""One file per module: `PACKAGE` says what to install, `make()` returns (module, train loader, val loader or None)."""
