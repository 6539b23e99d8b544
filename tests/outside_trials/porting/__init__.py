"""Code that was written for another framework."""
