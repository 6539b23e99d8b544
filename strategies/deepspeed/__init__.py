"""Training with the library DeepSpeed: ZeRO stages 0 to 3, and their offload to the host and to disks."""
