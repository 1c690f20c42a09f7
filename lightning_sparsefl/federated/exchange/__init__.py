"""What crosses between the server and the nodes, and its layout."""
