"""`trainwright migrate`: conversion of programs for Lightning and Accelerate."""
