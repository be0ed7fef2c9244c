"""The configuration that an operator writes."""
