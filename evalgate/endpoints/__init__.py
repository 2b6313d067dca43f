"""Endpoints: servers that we did not write, asked through a dialect over HTTP."""
