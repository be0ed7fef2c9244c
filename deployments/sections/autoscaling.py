"""The `autoscaling` section: when replicas are added and taken away (docs/kubernetes.md)."""

from pydantic import Field

from deployments.sections.base import Section


class AutoscalingArgs(Section):
    """Between `replica.count` and `max_replicas`, by the work that waits and by how full the replicas are."""

    max_replicas: int | None = Field(default=None, ge=1, le=4096)
    """The most; `replica.count` is the fewest, so there is never none. None: off, always `replica.count`."""
    target_drain_s: float = Field(default=2.0, gt=0, le=3600, allow_inf_nan=False)
    """What waits shall be computed in this time."""
    target_busy: float = Field(default=0.8, gt=0, le=1, allow_inf_nan=False)
    """How much of each replica shall be in use: time of the step thread, or slots of the KV pool."""
    upscale_delay_s: float = Field(default=30.0, ge=0, le=86_400, allow_inf_nan=False)
    """More replicas must have been wanted for so long."""
    downscale_delay_s: float = Field(default=600.0, ge=0, le=86_400, allow_inf_nan=False)
    """Fewer replicas must have been wanted for so long."""
    look_back_s: float = Field(default=30.0, gt=10, le=3600, allow_inf_nan=False)
    """Figures are averages over this time. Replicas report every 10 s."""
