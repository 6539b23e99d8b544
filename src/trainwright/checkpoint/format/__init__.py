"""The format of checkpoints on disk: layout, writing and reading."""
