"""The operators `miofind::convolution...`: what they are given, what runs them, and their gradients."""
