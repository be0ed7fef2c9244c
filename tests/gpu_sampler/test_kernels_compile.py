"""Every variant of the sampler's kernels passes the compiler's front end for the card, without one.

The interpreter runs what the compiler refuses, such as a name that a loop binds to a tensor of another shape. Needs
Triton, not interpreted.
"""

import importlib
import itertools
from typing import Any

import pytest

from tests.gpu_sampler.compiler import needs_compiler

pytestmark = needs_compiler
WARNS = pytest.mark.filterwarnings("ignore:tl\\.reshape:UserWarning", "ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
MASKED = "masked"  # not a constant: without a mask the pointer is None
NORMED = "normed"  # the same of norms
LOGPROBS = "with log-probabilities"  # the same of their outputs
ELSEWHERE = "with rows of FlashInfer"  # the same of their flags
SWITCHES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # of each kernel, and the values of its other constants
    "gpu_sampler.kernels.softmax_stats._softmax_stats_kernel": (
        ("PROCESSED", "WORDS", "TARGET", "EXPAND", MASKED),
        {"TILE_GROUPS": 8, "RULE": 1, "SEEDED": 0},
    ),
    "gpu_sampler.kernels.sample._sample_kernel": (
        ("HALF", "SIDE", "LISTS", "PROCESSED", "RAW_REPORT", "KEPT", LOGPROBS, ELSEWHERE),
        {"GROUPS": 2048, "PDL": True},
    ),
    "gpu_sampler.kernels.sample._report_kernel": (
        ("HALF", "SIDE", "SCORING", ELSEWHERE),
        {"GROUPS": 2048, "PARTS": 256, "PDL": True},
    ),
    "gpu_sampler.kernels.nucleus_rejection._nucleus_rejection_kernel": (
        ("SIDE", "COUNT", "WORDS"),
        {"TILE_GROUPS": 8, "TILES": 4, "PDL": True},
    ),
    "gpu_sampler.kernels.token_rank._token_rank_kernel": (
        ("SIDE", "PROCESSED", "WORDS"),
        {"TILE_GROUPS": 8, "TILES": 32, "PDL": True},
    ),
    "gpu_sampler.kernels.nucleus_fallback._nucleus_fallback_kernel": (
        ("SIDE", "PROCESSED", "KEPT", LOGPROBS),
        {"GROUPS": 2048, "PLACES": 64, "ID_BITS": 18, "PDL": True},
    ),
}
SWITCHES |= {  # of a verify step
    "gpu_sampler.kernels.verify_rows._expand_kernel": (("LAST",), {"RULE": 1, "SEEDED": 0}),
    "gpu_sampler.kernels.verify_rows._conclude_kernel": (("SIDE", "PROCESSED"), {}),
    "gpu_sampler.kernels.draft_probs._dense_totals_kernel": ((), {}),
    "gpu_sampler.kernels.rejection_sample._rejection_sample_kernel": (
        ("SIDE", "HAS_SPARSE", "HAS_DENSE", "PADS"),
        {"RULE": 2, "SEEDED": 1, "GROUPS": 2048, "PDL": True},
    ),
    "gpu_sampler.kernels.draft_sample._draft_sample_kernel": (
        ("HALF", "SIDE", "FIRST"),
        {"GROUPS": 2048, "RULE": 1, "SEEDED": 0},
    ),
}
SWITCHES |= {  # of a product of few rows
    "engine.kernels.skinny_gemm._skinny_gemm_kernel": (
        ("GATED", "BIASED", "WHOLE", "ADDED"),
        {"ROWS": 16, "COLUMNS": 8, "DEPTH": 64, "WARPS": 8, "STAGES": 3, "UPCAST": False, "PDL": True},
    ),
}
SWITCHES |= {  # of attention of few rows
    "engine.kernels.skinny_decode_attention._skinny_decode_attention_kernel": (
        ("CAPPED",),
        {"GROUP": 3, "ROUND_GROUP": 4, "D": 128, "CHUNK": 64, "PARTS": 32, "HEADS": 16, "JOINED": 8, "UPCAST": False}
        | {"STAGES": 3, "PDL": True},
    ),
}
SWITCHES |= {  # of what lies between products and attention of few tokens
    "engine.kernels.qk_norm_rope._qk_norm_rope_kernel": (
        (NORMED,),
        {"H": 16, "G": 8, "D": 128, "TOKENS": 8, "UPCAST": False, "PDL": True},
    ),
}
SWITCHES |= {  # of rows that keep their bits in any step
    "engine.kernels.invariant_gemm._invariant_gemm_kernel": (
        ("BIASED", "ADDED", "FEW"),
        {"BLOCK_M": 16, "BLOCK_N": 64, "DEPTH": 128, "GROUP": 8, "PARTS": 3, "PRECISION": "tf32x3", "UPCAST": False}
        | {"PDL": True},
    ),
    "engine.kernels.invariant_gemm._terms_kernel": ((), {"TERMS": 3, "COPIED": 1024, "PDL": True}),
    "engine.kernels.rms_norm._rms_norm_kernel": (("ROUND_FIRST",), {"N": 1000, "BLOCK": 1024, "PDL": True}),
    "engine.kernels.invariant_attention._invariant_attention_kernel": (
        ("SPLIT", "CAPPED"),
        {"GROUP": 3, "ROUND_GROUP": 4, "D": 80, "PADDED": 128, "ROWS": 64, "UPCAST": False}
        | {"SHORT": 128, "SHORTS": 12, "LONG": 384, "BLOCK": 32, "PDL": True},
    ),
}
SCALARS = {"row_stride", "mask_words", "n_columns", "chosen_stride", "c_columns", "V", "G", "tiles", "splits"}
SCALARS |= {"parts", "run", "K", "E", "q_stride", "offset", "x_stride", "M", "N"}
SCALARS |= {"q_row", "q_head", "window", "T", "of_all", "x_row", "x_term"}
SCALARS |= {"k_row", "v_row", "cos_row", "sin_row"}
HALVES = {"logits", "q_logits", "x", "weight", "bias", "y", "residual"}
HALVES |= {"q", "k_pool", "v_pool", "out"}
HALVES |= {"k", "v", "cos", "sin", "q_norm", "k_norm"}
INT64S = {"scratch", "keys"}
FLOATS = {"maxima", "sums", "raw_maxima", "raw_sums", "side_raw", "side_processed", "side", "row_floats", "draw_values"}
FLOATS |= {"q_probs", "q_best", "q_total", "rates", "weights", "entry_bias", "to_bias"}
FLOATS |= {"logprobs", "top_logprobs", "chosen_logprobs", "ahead_mass"}
FLOATS |= {"pieces", "of_pieces", "lse", "of_sums"}
REPORTED = ("logprobs", "ranks", "top_ids", "top_logprobs", "chosen_logprobs")
SINGLES = {"scale", "softcap", "eps", "added"}


def variants(kernel: str) -> list[dict[str, Any]]:
    """The constants of each variant that the launchers ask for."""
    names, others = SWITCHES[kernel]
    found: list[dict[str, Any]] = []
    for switched in itertools.product((False, True), repeat=len(names)):
        flags = dict(zip(names, switched, strict=True))
        if not flags.get("LISTS", True) and (flags["SIDE"] or flags[ELSEWHERE]):
            continue
        if flags.get("KEPT") and (flags.get(ELSEWHERE) or flags.get("HALF")):
            continue
        if "RAW_REPORT" in flags:
            never = flags["PROCESSED"] or flags[ELSEWHERE] or flags["KEPT"]
            if flags["RAW_REPORT"] != (flags["SIDE"] and flags[LOGPROBS] and not never):
                continue
        if flags.get("SCORING") and (flags["SIDE"] or flags[ELSEWHERE]):
            continue
        masked = flags.pop(MASKED, flags.get("SIDE", False))  # side lists and masks come together
        unmasked = {} if masked or "masks" not in names_of(kernel) else {"masks": None}
        unnormed = {} if flags.pop(NORMED, True) else {"q_norm": None, "k_norm": None}
        unreported = {} if flags.pop(LOGPROBS, True) else dict.fromkeys(REPORTED)
        ours = {} if flags.pop(ELSEWHERE, True) else {"elsewhere": None}
        absent = {name: None for name in {**unreported, **ours} if name in names_of(kernel)}
        found.append({**flags, **others, **unmasked, **unnormed, **absent})
    return found


def names_of(kernel: str) -> list[str]:
    module, name = kernel.rsplit(".", 1)
    found: list[str] = getattr(importlib.import_module(module), name).arg_names
    return found


def kind_of(name: str) -> str:
    """The type of a parameter, as the compiler spells it."""
    if name in HALVES:
        return "*bf16"
    if name == "kinds":
        return "*u8"
    if name in SCALARS:
        return "i32"
    if name in SINGLES:
        return "fp32"
    return "*fp32" if name in FLOATS else "*i64" if name in INT64S else "*i32"


def front_end(kernel: Any, constants: dict[str, Any]) -> None:
    """Triton's errors for what its language does not allow."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": 8})
    signature = {name: "constexpr" if name in constants else kind_of(name) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


@pytest.mark.full(keep=1)
@WARNS
@pytest.mark.parametrize("kernel", SWITCHES)
def test_every_variant_passes_the_front_end(kernel: str) -> None:
    module, name = kernel.rsplit(".", 1)
    launched = getattr(importlib.import_module(module), name)
    for constants in variants(kernel):
        front_end(launched, constants)


@WARNS
def test_name_bound_to_another_shape_in_a_loop_fails_the_same_check() -> None:
    import triton
    import triton.language as tl

    with pytest.raises(triton.compiler.errors.CompilationError):
        front_end(triton.jit(_other_shape(tl)), {"SIDE": True})


def _other_shape(tl: Any) -> Any:
    globals()["tl"] = tl  # the compiler looks for it among the globals of a kernel

    def other_shape(tokens, V, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
        ids = tl.arange(0, 128)
        for start in range(0, V, 1024):
            ids = start + tl.arange(0, 1024)
        tl.store(tokens + ids, ids)

    return other_shape
