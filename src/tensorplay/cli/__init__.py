"""The command line: `tensorplay demo` and its companions. Nothing below this layer imports it."""
