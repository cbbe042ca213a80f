"""Finding all convolutions of a network's step ahead, and tables of what runs them."""
