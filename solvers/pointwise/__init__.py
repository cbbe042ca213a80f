"""Element-wise passes over what convolutions have written."""
