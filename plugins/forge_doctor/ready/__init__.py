"""The road before a long run: data, doctor, one batch, smoke, resume, precision, device, speed, determinism, stack."""
