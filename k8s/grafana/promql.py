"""Builds PromQL expressions for panels. Sums of histograms and summaries are exact, so a mean is sum over count.

`$cluster`, `$application`, `$replica` and `$route` are the dashboards' variables; Grafana fills in `$__rate_interval`
and `$__range`.
"""

APP = 'cluster=~"$cluster", application=~"$application"'
REPLICA = f'{APP}, replica=~"$replica"'
ROUTE = f'{APP}, route=~"$route"'
WINDOW = "$__rate_interval"


def series(metric: str, where: str, more: str = "") -> str:
    """Selects a metric's series; `more` are further matchers."""
    return f"{metric}{{{where}{', ' if more else ''}{more}}}"


def total(value: str, by: str = "", how: str = "sum") -> str:
    """Aggregates a value by labels."""
    return f"{how} by ({by}) ({value})" if by else f"{how}({value})"


def level(metric: str, by: str = "", where: str = APP, more: str = "", how: str = "sum") -> str:
    """Returns a gauge's current value."""
    return total(series(metric, where, more), by, how)


def per_second(metric: str, by: str = "", where: str = APP, more: str = "", window: str = WINDOW) -> str:
    """Returns the rate of a counter."""
    return total(f"rate({series(metric, where, more)}[{window}])", by)


def events(metric: str, by: str = "", where: str = APP, more: str = "", window: str = WINDOW) -> str:
    """Returns the increase of a counter, for events that should never happen."""
    return total(f"increase({series(metric, where, more)}[{window}])", by)


def share(part: str, whole: str) -> str:
    """Divides a part by its whole."""
    return f"{part} / {whole}"


def mean(metric: str, by: str = "", where: str = APP, more: str = "") -> str:
    """Returns the mean of a histogram or summary."""
    return share(per_second(f"{metric}_sum", by, where, more), per_second(f"{metric}_count", by, where, more))


def quantile(q: float, metric: str, by: str = "", where: str = APP, more: str = "") -> str:
    """Returns a quantile of a histogram, within the width of its buckets."""
    return f"histogram_quantile({q}, {per_second(f'{metric}_bucket', f'{by}, le' if by else 'le', where, more)})"
