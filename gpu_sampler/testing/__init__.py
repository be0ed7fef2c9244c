"""What the tests of every sampler share: the enumerated law, statistics, many draws at once, and the cases."""
