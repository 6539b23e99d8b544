"""Tests of `trainwright.checkpoint`."""
