"""User-written loops under `MegatronLMPlugin`."""
