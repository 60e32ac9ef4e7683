"""Shipping: a trained task as a file that runs elsewhere; verified, quantised, timed and served."""
