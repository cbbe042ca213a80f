"""Views of NumPy's, CuPy's and PyTorch's arrays, and what is asked of them."""
