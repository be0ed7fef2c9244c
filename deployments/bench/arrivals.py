"""When requests are due, fixed before the first is sent: an open loop, as the world is."""

import random


def poisson(rate_per_s: float, seconds: float, draw: random.Random) -> list[float]:
    """Seconds after the start, in order: a Poisson process of `rate_per_s`. There is one arrival at least: a short
    run at a low rate measures something."""
    due, at = list[float](), draw.expovariate(rate_per_s)
    while at < seconds:
        due.append(at)
        at += draw.expovariate(rate_per_s)
    return due or [draw.uniform(0, seconds)]
