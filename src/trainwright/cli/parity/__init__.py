"""`trainwright parity`: strategies compared step by step."""
