"""What can be decided and at what price, and an independent judge."""
