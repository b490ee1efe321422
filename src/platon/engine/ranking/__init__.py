"""Which units are kept: their state, the passes that update it, and the exact choice of the best."""
