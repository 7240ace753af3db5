"""Instructions made steps: closures over the state of one batch of blocks."""
