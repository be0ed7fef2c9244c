"""Sends requests to replicas: admission, replica selection, sharding, retries and stream resume."""
