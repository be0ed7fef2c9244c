"""Defines the limits of the wire, and one flat view of every limit that a request must keep."""

from dataclasses import dataclass, field, fields

from gpu_sampler.sampling_params import SamplingLimits
from scoring.errors import ScoringLimits

PRIORITIES = (-1000, 1000)  # allowed range; a lower number is served earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Limits bodies, lists and answers. A request exactly at a limit passes; one more is refused."""

    max_body_bytes: int = 16_777_216
    max_headers: int = 128
    max_header_bytes: int = 32_768
    max_json_depth: int = 64
    max_json_values: int = 2_097_152
    max_json_containers: int = 262_144
    max_prompts: int = 1024
    max_messages: int = 1024
    max_rows: int = 8192
    max_request_tokens: int = 1_048_576
    max_stop: int = 16
    max_stop_chars: int = 256
    max_answer_cells: int = 1_000_000
    max_answer_bytes: int = 67_108_864
    max_tokenize_bytes: int = 2_097_152
    max_tokenize_tokens: int = 262_144
    max_string_chars: int = 2_000_000
    max_name_chars: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Holds every limit, by the package that owns it."""

    wire: WireLimits = field(default_factory=WireLimits)
    sampling: SamplingLimits = field(default_factory=SamplingLimits)
    scoring: ScoringLimits = field(default_factory=ScoringLimits)

    def flat(self) -> dict[str, int]:
        """Returns all limits by name: `/v1/models` shows them, and the wire models look them up."""
        parts = (self.wire, self.sampling, self.scoring)
        return {item.name: int(getattr(part, item.name)) for part in parts for item in fields(part)}
