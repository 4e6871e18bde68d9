"""What the user calls: printed wrappers around compiled graphs."""
