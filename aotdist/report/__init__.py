"""Reports on what was compiled and what it did: `explain` and its page, `profile`, progress, logs."""
