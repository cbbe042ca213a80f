"""What tiled kernels share on the host: correlations, planes, and the cost of tiles."""
