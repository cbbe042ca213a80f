"""Winograd's minimal filtering."""
