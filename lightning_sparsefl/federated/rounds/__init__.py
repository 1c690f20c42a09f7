"""One round: orders, answers, and what the server makes of them."""
