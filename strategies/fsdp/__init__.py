"""Fully sharded data parallelism with torch's `fully_shard` (FSDP2)."""
