"""What amp adds to an optimizer: its state, its class, and its step."""
