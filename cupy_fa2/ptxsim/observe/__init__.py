"""What a launch tells who watches it, step by step."""
