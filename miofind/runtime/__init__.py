"""Handles, solutions that run, and how they are kept."""
