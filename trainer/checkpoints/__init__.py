"""Saves and restores of a run: the queue, what a checkpoint holds, which one a stage starts from."""
