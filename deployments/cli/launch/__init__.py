"""Starts the service on one machine."""
