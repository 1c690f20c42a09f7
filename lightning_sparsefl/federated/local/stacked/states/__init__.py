"""What several clients have each of their own: weights, attributes of the module, and what undoes steps."""
