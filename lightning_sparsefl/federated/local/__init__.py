"""Local work of a node: its module, its engines, and the state that it keeps of its clients."""
