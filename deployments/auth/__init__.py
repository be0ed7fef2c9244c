"""Authentication by API key, scopes, rate limits and usage metering."""
