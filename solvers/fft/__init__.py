"""Products of Fourier transforms."""
