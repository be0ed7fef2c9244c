"""What an ingress knows of its replicas, and how a task gets to them, whatever becomes of them."""
