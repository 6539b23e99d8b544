"""Data parallelism with a piece of every tensor on each process: torch's `fully_shard` (FSDP2)."""
