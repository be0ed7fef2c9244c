"""Makes Python look for garbage less often in a process that makes thousands of short-lived objects a second."""

import gc

THRESHOLDS = (50_000, 2, 200)  # new objects before a collection of them, and younger collections before an older one
"""A collection stops every thread. The middle one looks at 200,000 objects at most, in 2 to 26 ms."""


def collect_rarely() -> None:
    """Leaves what exists now out of all collections, and has them run for every 50,000 new objects.

    Requests leave hardly any cycle behind: almost all of their objects go with the last reference.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
