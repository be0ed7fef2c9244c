"""Defines the dashboard of scoring: volume, latency by stage, label mass and prefix cache."""

from k8s.alerts.objectives import SCORING
from k8s.grafana.panels import Dashboard, Panel, PanelRow
from k8s.grafana.promql import REPLICA, ROUTE, mean, per_second, quantile, share

SCORE = 'kind="score"'
MASS = "assay_label_mass"


def _tokens(kind: str, where: str = REPLICA) -> str:
    return per_second("assay_tokens_total", "", where, f'kind="{kind}"')


WORK = PanelRow(
    "Work",
    (
        Panel(
            title="Items scored per second",
            unit="short",
            stacked=True,
            note="Questions, for decisions.",
            queries={"{{route}}": per_second("assay_items_total", "route", ROUTE)},
        ),
        Panel(
            title="Items a request",
            unit="short",
            note="Items over requests that were answered.",
            queries={
                "{{route}}": share(
                    per_second("assay_items_total", "route", ROUTE),
                    per_second("assay_requests_total", "route", ROUTE, f'{SCORING}, status="200"'),
                )
            },
        ),
        Panel(
            title="Blocks a request, requests a call",
            unit="short",
            note="A large request is shared out over replicas; small ones that wait share a call.",
            queries={
                "blocks, mean": mean("assay_fanout_shards"),
                "blocks, p99": quantile(0.99, "assay_fanout_shards"),
                "requests a call, mean": mean("assay_micro_batch_requests"),
            },
        ),
    ),
)

LATENCY = PanelRow(
    "Latency",
    (
        Panel(
            title="Time of scoring requests",
            unit="s",
            note="From the first byte to the last.",
            queries={
                f"p{round(100 * q)}": quantile(q, "assay_request_seconds", "", ROUTE, SCORING) for q in (0.5, 0.9, 0.99)
            },
        ),
        Panel(
            title="Mean time by part",
            unit="s",
            stacked=True,
            note="Queue, prefill and head as the slowest replica of a request measured them. Queue and "
            "prefill count generations too.",
            queries={
                "{{stage}}": mean(
                    "assay_stage_seconds", "stage", more='stage=~"parse|tokenize|queue|prefill|head|gather|encode"'
                )
            },
        ),
        Panel(
            title="Head's share of score steps",
            unit="percentunit",
            note="From the last layer to the rows' answers.",
            queries={
                "": share(
                    per_second("assay_lm_head_seconds_total", "", REPLICA),
                    per_second("assay_step_seconds_sum", "", REPLICA, SCORE),
                )
            },
        ),
    ),
)

QUALITY = PanelRow(
    "Quality",
    (
        Panel(
            title="Label mass, mean by route",
            unit="percentunit",
            note="What the model gave to all labels together. Low: it wanted to say something else.",
            queries={"{{route}}": mean(MASS, "route", ROUTE)},
        ),
        Panel(
            title="Label mass, 10th percentile",
            unit="percentunit",
            note="Items for which the model puts the least probability on the labels.",
            queries={"p10": quantile(0.1, MASS, "", ROUTE), "p50": quantile(0.5, MASS, "", ROUTE)},
        ),
        Panel(
            title="Items that were cut",
            unit="percentunit",
            note="Truncated to the length that fits, or that the request set.",
            queries={
                "{{route}}": share(
                    per_second("assay_truncated_items_total", "route", ROUTE),
                    per_second("assay_items_total", "route", ROUTE),
                )
            },
        ),
    ),
)

BATCHES = PanelRow(
    "Batches and cache",
    (
        Panel(
            title="Prompt tokens found in the cache",
            unit="percentunit",
            note="By the prefix tree, and shared between the rows of one request.",
            queries={"": share(_tokens("cached"), _tokens("prompt"))},
        ),
        Panel(
            title="Time of score steps",
            unit="s",
            note="On the step thread.",
            queries={
                "mean": mean("assay_step_seconds", "", REPLICA, SCORE),
                "p99": quantile(0.99, "assay_step_seconds", "", REPLICA, SCORE),
            },
        ),
        Panel(
            title="Size of score steps",
            unit="short",
            note="New tokens, and sequences.",
            queries={
                "tokens, mean": mean("assay_step_tokens", "", REPLICA, SCORE),
                "tokens, p99": quantile(0.99, "assay_step_tokens", "", REPLICA, SCORE),
                "sequences, mean": mean("assay_step_sequences", "", REPLICA, SCORE),
            },
        ),
        Panel(
            title="Padding",
            unit="percentunit",
            note="Tokens computed beside those of the step, over all computed. Graphs pad decode steps to their size.",
            queries={"": share(_tokens("padding"), f"({_tokens('computed')} + {_tokens('padding')})")},
        ),
        Panel(
            title="Wasted",
            unit="percentunit",
            note="Rows computed for requests that had ended meanwhile, over tokens computed.",
            queries={"": share(_tokens("wasted"), _tokens("computed"))},
        ),
        Panel(
            title="Score tokens per second",
            unit="short",
            note="New tokens of score steps.",
            queries={"{{replica}}": per_second("assay_step_tokens_sum", "replica", REPLICA, SCORE)},
        ),
    ),
)

DASHBOARD = Dashboard(
    name="scoring",
    title="Scoring",
    note="How much is scored, how long each part takes, how sure the model is, and what the cache spares.",
    rows=(WORK, LATENCY, QUALITY, BATCHES),
)
