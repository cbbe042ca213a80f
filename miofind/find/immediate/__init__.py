"""Answers that nothing is measured for: stored rows and predictions, ranked together."""
