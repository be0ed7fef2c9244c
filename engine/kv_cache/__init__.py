"""Stores keys and values by token slot, allocates slots, and keeps prefixes for reuse."""
