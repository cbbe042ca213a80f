"""Sums of products as they stand."""
