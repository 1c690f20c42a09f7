"""A federation of lightning-sparsefl on the nodes of a Flower deployment."""
