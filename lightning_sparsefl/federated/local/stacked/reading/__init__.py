"""Batches of several clients as one."""
