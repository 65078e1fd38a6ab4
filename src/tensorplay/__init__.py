"""TensorPlay Distributed Algorithms."""

__version__ = "0.1.0"
