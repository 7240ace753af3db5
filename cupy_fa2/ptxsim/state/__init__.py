"""What the blocks that run together consist of: registers, memories, counts."""
