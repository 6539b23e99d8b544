"""Context parallelism: the ranks of a process group split sequences, and attention spans all parts."""
