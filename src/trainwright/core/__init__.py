"""Core: types and helpers that every other part uses; imports torch and the standard library only."""
