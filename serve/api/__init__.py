"""The server's routes, and what they share."""
