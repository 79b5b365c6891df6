"""What a layer's cache of keys and values holds, and the reference of everything that reads or writes it."""
