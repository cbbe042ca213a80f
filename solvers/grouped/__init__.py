"""Groups of few channels."""
