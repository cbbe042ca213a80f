"""cuDNN's engines, and products of columns by cuBLASLt."""
