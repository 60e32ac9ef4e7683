"""A run as something to look at: its folder read back, curves as SVG, one HTML page. Nothing here imports torch."""
