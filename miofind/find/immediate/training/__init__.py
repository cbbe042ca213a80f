"""Models of the times of candidates, learnt from what FindDBs have measured."""
