"""Recorded steps: the operations of a stack's training step, repeated without the Python code around them."""
