"""Data parallelism with a whole replica on every process: DistributedDataParallel, its hooks, and local SGD."""
