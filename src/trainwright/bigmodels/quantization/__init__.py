"""Models whose weights are kept in fewer bits."""
