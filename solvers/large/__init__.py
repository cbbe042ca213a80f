"""Problems with tensors of 2^31 elements and more, which other solvers' kernels do not reach as a whole."""
