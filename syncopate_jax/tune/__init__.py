"""What was measured to be fast, as data, and how it is looked up."""
