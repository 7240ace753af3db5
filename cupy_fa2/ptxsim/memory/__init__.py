"""Global and shared memory: addresses, bounds and contents."""
