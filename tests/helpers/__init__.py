"""What several test modules share: ranks in processes, small tasks, recorders."""
