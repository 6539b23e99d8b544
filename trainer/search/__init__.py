"""Trial steps, replayed evaluation steps, state snapshots and the Tuner."""
