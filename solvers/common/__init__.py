"""What several families of solvers compute with."""
