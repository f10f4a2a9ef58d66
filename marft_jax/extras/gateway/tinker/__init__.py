"""The Tinker API over our engine and learner, for training loops of one's own."""
