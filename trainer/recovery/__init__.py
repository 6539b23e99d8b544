"""Failure handling: non-finite steps, rollbacks, signals, failures."""
