"""One node's work: its module, its engines, and what it keeps of its clients."""
