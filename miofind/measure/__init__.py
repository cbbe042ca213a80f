"""Times of runs: samples on a device or the host, races between candidates, and what they prove."""
