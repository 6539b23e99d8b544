"""Expert parallelism: the experts of a mixture are divided over data-parallel ranks, which exchange tokens."""
