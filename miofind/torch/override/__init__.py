"""What runs PyTorch's own convolution calls: kernels at the dispatcher, plans of calls, launches."""
