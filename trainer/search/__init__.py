"""Steps that are tried out or replayed: trials, snapshots of a state, the Tuner."""
