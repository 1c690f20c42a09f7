"""Evaluations of several clients as one."""
