"""Context parallelism: attention over a sequence that is split over the ranks of a process group."""
