"""From arrays to launches: where they live, what has to be copied, what is allocated."""
