"""Training with the XLA compiler, on TPUs and other devices of torch_xla."""
