"""PTX text as data."""
