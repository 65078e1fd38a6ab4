"""TensorPlay Distributed Algorithms."""
