"""Saving and loading of checkpoints in a run."""
