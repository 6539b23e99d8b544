"""Programs that users of other frameworks run every day, ported by changing their imports: they train and resume."""
