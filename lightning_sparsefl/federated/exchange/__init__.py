"""Data exchanged between the server and the nodes: its layout, its encoding and its validation."""
