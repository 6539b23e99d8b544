"""Optimizer steps: batch transfer, hooks, gradients and low-precision layers."""
