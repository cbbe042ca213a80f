"""A convolution as one matrix product on tensor cores."""
