"""Present runs: curves as SVG and one HTML page. Nothing here imports torch."""
