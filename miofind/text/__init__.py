"""Text for people: names of other people's made fit for a terminal, and tables for any width."""
