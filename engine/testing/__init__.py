"""A toy model whose answers are known, for tests."""
