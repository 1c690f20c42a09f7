"""The fit of several clients as one: loop, hooks and optimizer."""
