"""Comparison with PyTorch and with what the device can do at most."""
