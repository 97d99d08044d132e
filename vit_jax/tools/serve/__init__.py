"""A page and an API for trained models: nothing of JAX, but in `__main__`."""
