"""Defines the dashboard of sampling and speculative decoding."""

from k8s.grafana.panels import Dashboard, Panel, PanelRow
from k8s.grafana.promql import REPLICA, mean, per_second, quantile, share

DECODE = 'kind=~"decode|verify"'


def _tokens(kind: str) -> str:
    return per_second("assay_tokens_total", "", REPLICA, f'kind="{kind}"')


SAMPLER = PanelRow(
    "Sampler",
    (
        Panel(
            title="Sampled tokens, by branch",
            unit="short",
            stacked=True,
            note="Greedy and plain tokens are cheap; candidates are tokens with filters.",
            queries={"{{branch}}": per_second("assay_sampler_rows_total", "branch", REPLICA)},
        ),
        Panel(
            title="Sampler conditions, by flag",
            unit="short",
            note="bad_value must be 0: it counts logits that were not finite.",
            queries={"{{flag}}": per_second("assay_sampler_flags_total", "flag", REPLICA)},
        ),
        Panel(
            title="Tokens generated per second",
            unit="short",
            note="Tokens given to requests.",
            queries={"{{replica}}": per_second("assay_tokens_total", "replica", REPLICA, 'kind="generated"')},
        ),
        Panel(
            title="Time of decode steps",
            unit="s",
            note="Verify steps are decode steps with drafts.",
            queries={
                "{{kind}} mean": mean("assay_step_seconds", "kind", REPLICA, DECODE),
                "{{kind}} p99": quantile(0.99, "assay_step_seconds", "kind", REPLICA, DECODE),
            },
        ),
        Panel(
            title="Sequences of a decode step",
            unit="short",
            note="How many sequences share one read of the weights.",
            queries={
                "{{kind}} mean": mean("assay_step_sequences", "kind", REPLICA, DECODE),
                "{{kind}} p99": quantile(0.99, "assay_step_sequences", "kind", REPLICA, DECODE),
            },
        ),
        Panel(
            title="Steps that ran as a CUDA graph",
            unit="percentunit",
            note="Share of decode steps on a GPU. Batches over `engine.max_graph_batch_size` run without a graph.",
            queries={
                "": share(
                    per_second("assay_graph_replays_total", "", REPLICA),
                    per_second("assay_step_seconds_count", "", REPLICA, 'kind="decode"'),
                )
            },
        ),
    ),
)

SPECULATION = PanelRow(
    "Speculation",
    (
        Panel(
            title="Drafts accepted, by position",
            unit="percentunit",
            note="Acceptance rate given that all drafts before were accepted.",
            queries={
                "{{position}}": share(
                    per_second("assay_spec_accepted_tokens_total", "position", REPLICA),
                    f"({per_second('assay_spec_verified_tokens_total', 'position', REPLICA)} > 0)",
                )
            },
        ),
        Panel(
            title="Drafts per second",
            unit="short",
            note="Draft tokens made, and accepted.",
            queries={"drafted": _tokens("drafted"), "accepted": _tokens("accepted")},
        ),
        Panel(
            title="Accepted tokens a draft",
            unit="short",
            note="Tokens that a verify step gives beyond the one of a decode step.",
            queries={"": share(_tokens("accepted"), per_second("assay_spec_drafts_total", "", REPLICA))},
        ),
        Panel(
            title="Time in steps with drafts, by part",
            unit="percentunit",
            stacked=True,
            note="Seconds a second. Drafting pays while its part is small.",
            queries={"{{part}}": per_second("assay_spec_seconds_total", "part", REPLICA)},
        ),
        Panel(
            title="Drafts from an unknown distribution",
            unit="short",
            note="Verified as if the draft were certain: still exact, but fewer are accepted.",
            queries={"": per_second("assay_spec_unknown_drafts_total", "", REPLICA)},
        ),
        Panel(
            title="Tokens a verify step",
            unit="short",
            note="New tokens of a verify step, drafts included.",
            queries={"": mean("assay_step_tokens", "", REPLICA, 'kind="verify"')},
        ),
    ),
)

DASHBOARD = Dashboard(
    name="sampling",
    title="Sampling and speculation",
    note="Sampled tokens by branch, sampler conditions, and the gain of drafts.",
    rows=(SAMPLER, SPECULATION),
)
