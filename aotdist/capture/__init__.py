"""From a callable or module to a `Program`: flat tensors in, names on everything."""
