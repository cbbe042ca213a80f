"""Vendor libraries behind plain values: plans that are made once and launched with device addresses.

Each module imports its library inside functions, so that a machine without it can list and describe solutions.
"""
