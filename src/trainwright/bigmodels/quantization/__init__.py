"""Models with weights quantized to 8 or 4 bits."""
