"""What becomes of candidates, in this process or in a child."""
