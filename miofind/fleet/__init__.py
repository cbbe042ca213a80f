"""Tuning over many hosts."""
