"""Data parallelism with full replicas: DistributedDataParallel, its communication hooks, and local SGD."""
