"""Reading, overriding, building and saving of configurations."""
