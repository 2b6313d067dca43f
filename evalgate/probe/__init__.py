"""What an endpoint honours."""
