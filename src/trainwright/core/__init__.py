"""Ground floor: plain words that every other part speaks; imports torch and the standard library only."""
