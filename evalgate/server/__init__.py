"""The embedded server's life, and the way to it."""
