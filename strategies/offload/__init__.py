"""Training a model that is larger than its device: weights, gradients and optimizer states on the host or on disk."""
