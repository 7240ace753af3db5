"""What opcodes compute: pure functions of NumPy arrays."""
