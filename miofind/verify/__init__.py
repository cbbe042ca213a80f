"""Whether a candidate computes the convolution: inputs, references, bounds, and where to look."""
