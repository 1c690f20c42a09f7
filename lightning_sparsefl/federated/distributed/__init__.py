"""Distributed runs: starting processes, communication between them, placement of clients on ranks."""
