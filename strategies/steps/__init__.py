"""One optimizer step: how batches arrive, what is fired and when, gradients, and steps that are tried out."""
