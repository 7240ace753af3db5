"""The tuner's parts: what is tried, what it takes, what is written. ``bench/tune.py`` is the command."""
