"""Language-model data: files of tokens, and datasets of samples of equal length."""
