"""Training with DeepSpeed: ZeRO stages 0 to 3, with offload to the host or to disk."""
