"""miofind in PyTorch."""
