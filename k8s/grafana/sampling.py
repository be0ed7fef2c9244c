"""Sampling and speculation: which way rows are drawn, what the sampler met, and whether drafts pay."""

from k8s.grafana.panels import Dashboard, Panel, Query, Row
from k8s.grafana.promql import REPLICA, mean, per_second, quantile, share

DECODE = 'kind=~"decode|verify"'


def _tokens(kind: str) -> str:
    return per_second("assay_tokens_total", "", REPLICA, f'kind="{kind}"')


SAMPLER = Row(
    "Sampler",
    (
        Panel(
            title="Rows drawn, by branch",
            unit="short",
            stacked=True,
            note="Greedy and plain rows are cheap; candidates are rows with filters.",
            queries=(Query(per_second("assay_sampler_rows_total", "branch", REPLICA), "{{branch}}"),),
        ),
        Panel(
            title="What the sampler met, by flag",
            unit="short",
            note="bad_value must be 0: logits that were not finite.",
            queries=(Query(per_second("assay_sampler_flags_total", "flag", REPLICA), "{{flag}}"),),
        ),
        Panel(
            title="Tokens generated per second",
            unit="short",
            note="Handed to requests.",
            queries=(Query(per_second("assay_tokens_total", "replica", REPLICA, 'kind="generated"'), "{{replica}}"),),
        ),
        Panel(
            title="Time of decode steps",
            unit="s",
            note="Verify steps are decode steps with drafts.",
            queries=(
                Query(mean("assay_step_seconds", "kind", REPLICA, DECODE), "{{kind}} mean"),
                Query(quantile(0.99, "assay_step_seconds", "kind", REPLICA, DECODE), "{{kind}} p99"),
            ),
        ),
        Panel(
            title="Sequences of a decode step",
            unit="short",
            note="How many streams share the reading of the weights.",
            queries=(
                Query(mean("assay_step_sequences", "kind", REPLICA, DECODE), "{{kind}} mean"),
                Query(quantile(0.99, "assay_step_sequences", "kind", REPLICA, DECODE), "{{kind}} p99"),
            ),
        ),
        Panel(
            title="Steps that ran as a captured graph",
            unit="percentunit",
            note="Of decode steps, on CUDA. Fewer: batches larger than the graphs, or contexts longer.",
            queries=(
                Query(
                    share(
                        per_second("assay_graph_replays_total", "", REPLICA),
                        per_second("assay_step_seconds_count", "", REPLICA, 'kind="decode"'),
                    )
                ),
            ),
        ),
    ),
)

SPECULATION = Row(
    "Speculation",
    (
        Panel(
            title="Drafts accepted, by position",
            unit="percentunit",
            note="Given that all drafts before it were accepted.",
            queries=(
                Query(
                    share(
                        per_second("assay_spec_accepted_tokens_total", "position", REPLICA),
                        f"({per_second('assay_spec_verified_tokens_total', 'position', REPLICA)} > 0)",
                    ),
                    "{{position}}",
                ),
            ),
        ),
        Panel(
            title="Drafts per second",
            unit="short",
            note="Made, and accepted.",
            queries=(Query(_tokens("drafted"), "drafted"), Query(_tokens("accepted"), "accepted")),
        ),
        Panel(
            title="Accepted a run",
            unit="short",
            note="Tokens that a verify step gives beyond the one that a decode step would.",
            queries=(Query(share(_tokens("accepted"), per_second("assay_spec_drafts_total", "", REPLICA))),),
        ),
        Panel(
            title="Time in steps with drafts, by part",
            unit="percentunit",
            stacked=True,
            note="Seconds a second. Drafting pays while its part is small against what is accepted.",
            queries=(Query(per_second("assay_spec_seconds_total", "part", REPLICA), "{{part}}"),),
        ),
        Panel(
            title="Runs drawn from an unknown law",
            unit="short",
            note="Verified as if the draft had been certain: exact still, but fewer are accepted.",
            queries=(Query(per_second("assay_spec_unknown_drafts_total", "", REPLICA)),),
        ),
        Panel(
            title="Tokens a verify step",
            unit="short",
            note="New tokens that go through the model, drafts included.",
            queries=(Query(mean("assay_step_tokens", "", REPLICA, 'kind="verify"')),),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="sampling",
    title="Sampling and speculation",
    note="Which way rows are drawn, what the sampler met, and whether drafts pay.",
    rows=(SAMPLER, SPECULATION),
)
