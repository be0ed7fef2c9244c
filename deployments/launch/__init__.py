"""How the service is started on a machine, and what it may leave there."""
