"""Expressions that panels share. Sums of our histograms and summaries are exact, so a mean is sum over count.

`$cluster`, `$application`, `$replica` and `$route` are the dashboards' variables; Grafana fills in `$__rate_interval`
and `$__range`.
"""

APP = 'cluster=~"$cluster", application=~"$application"'
REPLICA = f'{APP}, replica=~"$replica"'
ROUTE = f'{APP}, route=~"$route"'
WINDOW = "$__rate_interval"


def series(metric: str, where: str, more: str = "") -> str:
    """The metric's series; `more` are further matchers."""
    return f"{metric}{{{where}{', ' if more else ''}{more}}}"


def total(value: str, by: str = "", how: str = "sum") -> str:
    return f"{how} by ({by}) ({value})" if by else f"{how}({value})"


def level(metric: str, by: str = "", where: str = APP, more: str = "", how: str = "sum") -> str:
    """A gauge's value now."""
    return total(series(metric, where, more), by, how)


def per_second(metric: str, by: str = "", where: str = APP, more: str = "", window: str = WINDOW) -> str:
    """How fast a counter rises."""
    return total(f"rate({series(metric, where, more)}[{window}])", by)


def events(metric: str, by: str = "", where: str = APP, more: str = "", window: str = WINDOW) -> str:
    """By how much a counter rose: for what should never happen, where one is news."""
    return total(f"increase({series(metric, where, more)}[{window}])", by)


def share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def mean(metric: str, by: str = "", where: str = APP, more: str = "") -> str:
    """Of a histogram or summary."""
    return share(per_second(f"{metric}_sum", by, where, more), per_second(f"{metric}_count", by, where, more))


def quantile(q: float, metric: str, by: str = "", where: str = APP, more: str = "") -> str:
    """Of a histogram, as finely as its buckets are."""
    return f"histogram_quantile({q}, {per_second(f'{metric}_bucket', f'{by}, le' if by else 'le', where, more)})"
