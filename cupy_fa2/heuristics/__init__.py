"""Choices: which tile for which problem on which card. Pure functions, with the reason beside each number."""
