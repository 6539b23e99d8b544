"""Commands that report on runs from their folders."""
