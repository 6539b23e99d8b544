"""Tensor parallelism: plans that split the layers of a model over processes, with or without FSDP."""
