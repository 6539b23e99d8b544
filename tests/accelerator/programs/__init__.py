"""Whole programs in the form of Accelerate's examples, with the import changed; each function trains and returns."""
