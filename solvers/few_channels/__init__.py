"""Up to four channels, as in first layers."""
