"""Expert parallelism: data-parallel ranks hold different experts of a mixture and exchange tokens."""
