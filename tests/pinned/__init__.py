"""What no change may alter: stored checkpoints and what comes after them, public signatures, and countable costs."""
