"""Context parallelism: the ranks of a process group split sequences, and attention covers the full sequences."""
