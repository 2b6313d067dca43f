"""How long a test waits for something that ends by itself: a limit for what hangs, never for what is slow."""

STUCK = 900  # seconds; a loaded machine may take minutes over what takes an idle one seconds
