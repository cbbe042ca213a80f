"""Wrong solvers ("mutants"), each with one fault, and right ones that look odd: what a default find must tell apart.

`host` has those of the CPU place, `cuda` those of a GPU, and `find` runs a find over one of them.
"""
