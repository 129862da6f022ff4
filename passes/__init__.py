"""The compiler: one pass a file."""
