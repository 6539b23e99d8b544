"""Training by XLA's compiler, on TPUs and the other devices of torch_xla."""
