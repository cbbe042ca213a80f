"""One filter a channel."""
