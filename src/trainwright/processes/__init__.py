"""The processes of a run: launching, process groups, collectives, and hang detection."""
