"""Joins kernels of a compiled decoder layer.

    r + skinny_gemm(x, w)                          ->  skinny_gemm(x, w, residual=r), where nothing else reads it
    r + invariant_linear(x, w)                     ->  likewise
    attend(rotate(norm(q)), rotate(norm(k)), v)    ->  attend_qk_norm_rope(q, k, v, ...)    with norms or without

Gain: a captured step spends a microsecond or three on every kernel, however little it does
(`engine.kernels.qk_norm_rope` has figures). Invariant norms are kernels of their own, which the compiler cannot join
with a rotation. Switches: `engine.compile`, and for products `engine.skinny_gemm` or `engine.numerics: invariant`.

Patterns are found in the graph that torch's compiler makes of a layer's own code, before it lowers anything, by what
nodes compute and not by the names of modules: a method call or an operator is one node, and has an example of its
result. Nothing here adds a guard: symbols are compared by name. A sum has the bits of the model's own code; norm and
rotation are computed in float32 and rounded once, where that code rounds several times.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import fx

import engine.attention.qk_norm_rope_op  # these register the ops
import engine.model.invariant.layers
import engine.model.optimize.skinny_linear  # noqa: F401
from gpu_sampler.backend import runs_kernels

# How many arguments a product has by itself.
FIELDS: Final[dict[Any, int]] = {torch.ops.assay.skinny_gemm: 4, torch.ops.assay.invariant_linear: 6}
ADD: Final = (operator.add, torch.add, "add")
_MUL: Final = (operator.mul, torch.mul, "mul")
_NEG: Final = (operator.neg, torch.neg, "neg")
_CASTS: Final = ("to", "type_as", "float")
_IN_PLACE: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITING: Final = {operator.setitem, *(getattr(operator, f"i{name}") for name in _IN_PLACE)}


class Norm(NamedTuple):
    """Describes an RMSNorm, g x / sqrt(mean(x^2) + eps) over the last dim, in float32."""

    x: fx.Node
    weight: fx.Node
    eps: float


class Rotated(NamedTuple):
    """Describes a rotary embedding, x cos + (-b, a) sin, (a, b) being the halves of x's last dim."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def value(node: Any) -> torch.Tensor | None:
    """Returns an example of the tensor that a node makes."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def same_form(*nodes: fx.Node) -> bool:
    """Returns whether the tensors of these nodes have the same type, device and shape."""
    forms = {None if one is None else (one.dtype, one.device, form(one)) for one in map(value, nodes)}
    return len(forms) == 1 and None not in forms


def form(tensor: torch.Tensor) -> tuple[str, ...]:
    """Returns the shape of a tensor, symbols by their names."""
    return tuple(map(str, tensor.shape))


def storage(node: Any) -> int | None:
    """Returns a name of the memory that a node's tensor lies in."""
    found = value(node)
    return None if found is None else found.untyped_storage()._cdata


def written(graph: fx.Graph) -> set[int | None]:
    """Returns the memory that some node writes to: nodes that read it must not move."""
    return {storage(node.args[0]) for node in graph.nodes if node.args and _writes(node)}


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in _WRITING or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def operands(node: Any, targets: Sequence[Any]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields both orders of the two tensors that `node` adds or multiplies."""
    if isinstance(node, fx.Node) and node.target in targets and len(node.args) == 2 and not node.kwargs:
        one, other = node.args
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            yield one, other
            yield other, one


def transposed(node: Any) -> fx.Node | None:
    """Returns the node whose dims 1 and 2 `node` exchanges."""
    if isinstance(node, fx.Node) and node.target in ("transpose", torch.transpose) and node.args[1:] == (1, 2):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    return None


def norm_of(node: fx.Node) -> Norm | None:
    """Returns the RMSNorm that `node` computes, as g * cast(y) or cast(g * y)."""
    made = value(node)
    if made is None:
        return None
    if node.target is torch.ops.assay.invariant_rms_norm:
        given: tuple[Any, ...] = node.args
        x, weight, eps, offset, *_ = given
        return Norm(x, weight, eps) if offset == 0 and same_form(node, x) else None
    for weight, y in operands(_cast(node) or node, _MUL):
        own = value(weight)
        if own is None or own.dim() != 1:
            continue
        for wide, root in operands(_cast(y) or y, _MUL):
            eps, x = _epsilon(root, wide), _cast(wide)
            inside = value(wide)
            if eps is None or x is None or inside is None or inside.dtype is not torch.float32:
                continue
            if same_form(node, x) and form(own) == form(made)[-1:]:
                return Norm(x, weight, eps)
    return None


def rotated(node: Any) -> Rotated | None:
    """Returns the rotary embedding of [1, H, T, D] by angles [1, T, D] that `node` computes, the halves of a head being
    its first and its second D / 2 numbers."""
    for plain, turned in operands(node, ADD):
        for x, cos in operands(plain, _MUL):
            for halves, sin in operands(turned, _MUL):
                angles = _angles(cos), _angles(sin)
                if angles[0] is not None and angles[1] is not None and _turns(halves, x) and same_form(node, x):
                    return Rotated(x, angles[0], angles[1])
    return None


def _angles(node: fx.Node) -> fx.Node | None:
    """Returns the node of the angles [1, T, D] that every head is multiplied with."""
    if node.target not in ("unsqueeze", torch.unsqueeze) or node.args[1:] != (1,) or node.kwargs:
        return None
    found = value(node.args[0])
    return node.args[0] if found is not None and found.dim() == 3 and isinstance(node.args[0], fx.Node) else None


def _turns(node: fx.Node, x: fx.Node) -> bool:
    """Returns whether `node` is (-b, a) of the halves (a, b) of x."""
    given = value(x)
    if node.target is not torch.cat or given is None or given.dim() != 4:
        return False
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dim != -1 or not isinstance(parts, tuple | list) or len(parts) != 2:
        return False
    half = given.shape[3] // 2
    second, first = parts
    if not (isinstance(second, fx.Node) and isinstance(first, fx.Node) and second.target in _NEG):
        return False
    return _part(first, x) == slice(None, half, None) and _part(second.args[0], x) == slice(half, None, None)


def _part(node: Any, x: fx.Node) -> slice | None:
    """Returns the part of x's last dim that `node` takes."""
    if isinstance(node, fx.Node) and node.target is operator.getitem and node.args[0] is x:
        at: Any = node.args[1]
        if isinstance(at, tuple) and len(at) == 2 and at[0] is Ellipsis and isinstance(at[1], slice):
            return at[1]
    return None


def _epsilon(root: fx.Node, wide: fx.Node) -> float | None:
    """Returns eps where `root` is rsqrt(mean(wide^2 over a row) + eps)."""
    if root.target not in (torch.rsqrt, "rsqrt") or not isinstance(root.args[0], fx.Node):
        return None
    total = root.args[0]
    if total.target not in ADD or len(total.args) != 2 or total.kwargs:
        return None
    mean, eps = total.args if isinstance(total.args[1], float) else total.args[::-1]
    if not isinstance(mean, fx.Node) or not isinstance(eps, float) or mean.target not in (torch.mean, "mean"):
        return None
    dims = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
    row = dims in (-1, (-1,), [-1]) and (mean.kwargs.get("keepdim") is True or mean.args[2:] == (True,))
    square = mean.args[0]
    if not row or mean.kwargs.get("dtype") is not None or not isinstance(square, fx.Node):
        return None
    squared = square.target in (torch.pow, "pow", operator.pow) and square.args == (wide, 2)
    return eps if squared or (square.target in _MUL and square.args == (wide, wide)) else None


def _cast(node: fx.Node) -> fx.Node | None:
    """Returns the node that `node` converts to another type."""
    if node.op == "call_method" and node.target in _CASTS and isinstance(node.args[0], fx.Node):
        given, own = value(node.args[0]), value(node)
        if given is not None and own is not None and given.device == own.device:
            return node.args[0]
    return None


@dataclass(frozen=True, slots=True)
class FusionBackend:
    """Implements a backend of `torch.compile`: joins what it can, then calls the backend of this name."""

    backend: str

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if join_kernels(module.graph):
            module.recompile()
        compile_graph: Any = torch._dynamo.lookup_backend(self.backend)
        compiled: Callable[..., Any] = compile_graph(module, inputs)
        return compiled


def join_kernels(graph: fx.Graph) -> int:
    """Applies both patterns, in place. Nodes without readers stay: the compiler knows which of them write.

    Returns:
        The number of places where it has joined kernels.
    """
    ops = torch.ops.assay
    nodes = list(graph.nodes)
    skinny = any(node.target is ops.skinny_gemm for node in nodes)
    fixed = written(graph)
    joined = 0
    for node in nodes:
        if found := next(_residuals(node), None):
            product, residual = found
            if not {storage(product.args[0]), storage(residual)} & fixed:
                _replace(graph, node, product.target, (*product.args, residual))
                graph.erase_node(product)
                joined += 1
        heads = _rotations(node) if node.target is ops.attend else None
        # Many rows gain by a kernel alone, and torch's mean of a head may depend on their number.
        if heads is not None and not skinny and not _has_kernel(heads[:3], node.args[3]):
            heads = None
        if heads is not None and not set(map(storage, heads[:5])) & fixed:
            _replace(graph, node, ops.attend_qk_norm_rope, (*heads, *node.args[3:]))
            joined += 1
    if joined:
        graph.lint()
    return joined


def _has_kernel(heads: Sequence[fx.Node], keys: fx.Node) -> bool:
    """Returns whether `engine.kernels.qk_norm_rope` computes heads [1, T, H or G, D], and stores them among `keys`."""
    found = [value(one) for one in (*heads, keys)]
    if found[0] is None or not runs_kernels(found[0].device):
        return False
    from engine.kernels.qk_norm_rope import DIMS, HALVES  # Triton is no part of a CPU's installation

    forms = {None if one is None else (one.dtype, one.shape[-1]) for one in found}
    return len(forms) == 1 and found[0].dtype in HALVES and found[0].shape[-1] in DIMS


def _replace(graph: fx.Graph, node: fx.Node, op: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        whole = graph.call_function(op, args)
    whole.meta = dict(node.meta)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


def _residuals(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields (product, residual) where `node` is their sum and the product's only reader."""
    ops = torch.ops.assay
    for product, residual in operands(node, ADD):
        gated = product.target is ops.skinny_gemm and product.args[3]
        plain = len(product.args) == FIELDS.get(product.target) and not gated
        if plain and len(product.users) == 1 and product is not residual and same_form(node, product, residual):
            yield product, residual


def _rotations(node: fx.Node) -> tuple[Any, ...] | None:
    """Returns (q, k, v, cos, sin, norms of q and k, eps) where `node` attends with queries and keys that are rotated
    alike; the first three are [1, T, H or G, D]."""
    q, k, v = (rotated(node.args[0]), rotated(node.args[1]), transposed(node.args[2]))
    if q is None or k is None or v is None or (q.cos, q.sin) != (k.cos, k.sin):
        return None
    q_heads, k_heads = transposed(q.x), transposed(k.x)
    if q_heads is None or k_heads is None:
        return None
    norms = norm_of(q_heads), norm_of(k_heads)
    if norms[0] is not None and norms[1] is not None and norms[0].eps == norms[1].eps:
        return norms[0].x, norms[1].x, v, q.cos, q.sin, norms[0].weight, norms[1].weight, norms[0].eps
    return q_heads, k_heads, v, q.cos, q.sin, None, None, 0.0
