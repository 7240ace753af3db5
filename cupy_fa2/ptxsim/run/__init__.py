"""What runs next: branches, waits and barriers, and the launch around them."""
