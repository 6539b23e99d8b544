"""Plans: what a fit will do, computed without training."""
