"""Names: where public ones are imported from, which are hidden, and what others' code calls ours."""
