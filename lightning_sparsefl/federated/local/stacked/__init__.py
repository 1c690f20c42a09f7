"""The stacked engine: several clients of one module train as a single batched computation."""
