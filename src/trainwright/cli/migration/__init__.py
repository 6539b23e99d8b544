"""`trainwright migrate`: programs of Lightning and Accelerate, rewritten."""
