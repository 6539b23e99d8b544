"""The objects of a loop as `Accelerator.prepare` returns them."""
