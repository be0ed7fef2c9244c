"""The paged KV pool, its manager and the prefix cache."""
