"""What a Trainer was told: its arguments, checked and resolved."""
