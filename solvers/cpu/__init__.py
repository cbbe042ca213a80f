"""NumPy, for the CPU place."""
