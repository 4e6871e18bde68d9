"""From a `Program` to one joint forward/backward graph and the facts read off it."""
