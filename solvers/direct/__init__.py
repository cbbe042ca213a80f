"""Direct summation."""
