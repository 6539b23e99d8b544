"""Names: lazy imports of public names, hidden names, and other libraries' names for ours."""
