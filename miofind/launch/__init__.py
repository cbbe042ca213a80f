"""Steps made ready on a device, and launched."""
