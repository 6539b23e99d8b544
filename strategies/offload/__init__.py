"""Training a model that is larger than its device: weights, gradients and states at home on the host or on disk."""
