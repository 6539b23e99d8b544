"""What goes wrong in a run: steps that are not finite, rollbacks, signals, failures."""
