"""The link: calls and their replies between an ingress and a replica over a socket of their own, beside Ray."""
