"""What a solver is, what it gives, and where all of them are found."""
