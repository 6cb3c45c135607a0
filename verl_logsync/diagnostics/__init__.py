"""What the logs mean: numbers that no trainer logs, and what to notice in them."""
