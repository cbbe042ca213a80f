"""What is computed, in float64: a convolution, and what an epilogue makes of it."""
