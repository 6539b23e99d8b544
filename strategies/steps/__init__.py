"""One optimizer step: batch transfer, hooks, gradients and low-precision layers."""
