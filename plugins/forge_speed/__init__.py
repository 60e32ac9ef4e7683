"""Speed: the fastest stack found by trying, and plugins that make a step faster."""
