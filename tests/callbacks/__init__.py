"""Tests of trainwright.callbacks."""
