"""Expert parallelism: data-parallel ranks hold different experts of a mixture-of-experts model, and exchange tokens."""
