"""Replicas that may die and rejoin during a run, with the library torchft."""
