"""Threads, forks, signals and child processes."""
