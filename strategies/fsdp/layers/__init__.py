"""Tensor parallelism: plans that split the layers of a model over processes, alone or beside FSDP."""
