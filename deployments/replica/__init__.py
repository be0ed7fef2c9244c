"""The replica: one engine behind methods that other processes call."""
