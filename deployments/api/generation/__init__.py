"""Turns completion and chat requests into tasks for a replica, and token chunks into responses."""
