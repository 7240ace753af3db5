"""What a kernel is: its spec, its argument struct, the text it is compiled from."""
