"""What stands before and behind the products of few rows is done by them, in compiled layers.

    narrow_linear(rms_norm(x), w)      ->  narrow_linear(x, w, norm)          where nothing else reads the norm
    r + narrow_linear(x, w)            ->  narrow_linear(x, w, residual=r)    where nothing else reads the product

A decoder layer is two of each. A captured step of few rows spends two or three microseconds on every kernel, however
little it does, and these do next to nothing. They are found in the graph that the compiler is given, by what is
computed and not by the names of modules; a norm of another form stays what it is. The residual changes no bit. With a
norm g x is rounded where the model's own code rounds x / sqrt(mean(x^2) + eps) first, and g times that again.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import fx

_ADD: Final = (operator.add, torch.add, "add")
_MUL: Final = (operator.mul, torch.mul, "mul")
_WRITING: Final = {operator.setitem} | {
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
_CASTS: Final = ("to", "type_as", "float")
_NORMED_TYPE: Final = torch.bfloat16  # g x of a type with less range could overflow where the model's own code cannot


@dataclass(frozen=True, slots=True)
class Joining:
    """A backend of `torch.compile`: joins what it can, and leaves the rest to the backend of that name."""

    backend: str

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if join(module.graph):
            module.recompile()
        compile_graph: Any = torch._dynamo.lookup_backend(self.backend)
        compiled: Callable[..., Any] = compile_graph(module, inputs)
        return compiled


class _Norm(NamedTuple):
    """g x / sqrt(mean(x^2) + eps)."""

    x: fx.Node
    weight: fx.Node
    eps: float


def join(graph: fx.Graph) -> int:
    """Joins what it can, in place; how many nodes became part of a product. Nodes that nobody reads any more stay: the
    compiler knows which of them write to something."""
    op = torch.ops.assay.narrow_linear
    written = _written(graph)
    joined = 0
    for node in list(graph.nodes):
        norm = _norm_of(node) if node.users else None
        if norm and _storage(norm.x) not in written and all(_reads_first(user, node, op) for user in node.users):
            for product in list(node.users):
                _replace(graph, product, product, (norm.x, *product.args[1:4], norm.weight, norm.eps))
            joined += 1
    for node in list(graph.nodes):
        found = next(_residuals(node, op), None)
        if found and not {_storage(found[1]), _storage(found[0].args[0])} & written:
            product, residual = found
            before = product.args[4:6] or (None, 0.0)
            _replace(graph, product, node, (*product.args[:4], *before, residual))
            graph.erase_node(product)
            joined += 1
    if joined:
        graph.lint()
    return joined


def _replace(graph: fx.Graph, product: fx.Node, last: fx.Node, args: tuple[Any, ...]) -> None:
    """A product with these arguments takes the place of `last`."""
    with graph.inserting_before(last):
        whole = graph.call_function(product.target, args)  # type: ignore[arg-type]
    whole.meta = dict(last.meta)
    last.replace_all_uses_with(whole)
    graph.erase_node(last)


def _reads_first(user: fx.Node, node: fx.Node, op: Any) -> bool:
    """Whether `user` is a product of `node` by something else, with no norm yet."""
    return (
        user.target is op
        and len(user.args) == 4
        and not user.kwargs
        and user.all_input_nodes.count(node) == 1
        and (user.args[0] is node)
    )


def _residuals(node: fx.Node, op: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(product, what is added to it) where `node` is such a sum and its only reader."""
    for product, residual in _operands(node, _ADD):
        plain = product.target is op and not product.args[3] and len(product.args) < 7 and not product.kwargs
        if plain and len(product.users) == 1 and product is not residual and _same_form(node, product, residual):
            yield product, residual


def _norm_of(node: fx.Node) -> _Norm | None:
    """If `node` is an RMSNorm of `_NORMED_TYPE` numbers, computed in float32: g * cast(y) or cast(g * y)."""
    value = _value(node)
    if value is None or value.dtype is not _NORMED_TYPE:
        return None
    scaled = _cast(node) or node
    for weight, y in _operands(scaled, _MUL):
        own = _value(weight)
        if own is None or own.dim() != 1 or own.dtype is not _NORMED_TYPE:
            continue
        for wide, root in _operands(_cast(y) or y, _MUL):
            eps = _epsilon(root, wide)
            x = _cast(wide)
            if eps is None or x is None:
                continue
            given, inside = _value(x), _value(wide)
            if given is None or inside is None or (given.dtype, inside.dtype) != (_NORMED_TYPE, torch.float32):
                continue
            if _same_form(node, x) and own.shape[0] == given.shape[-1]:
                return _Norm(x, weight, eps)
    return None


def _epsilon(root: fx.Node, wide: fx.Node) -> float | None:
    """eps where `root` is rsqrt(mean(wide^2 over a row) + eps)."""
    if root.target not in (torch.rsqrt, "rsqrt") or not isinstance(root.args[0], fx.Node):
        return None
    total = root.args[0]
    if total.target not in _ADD or len(total.args) != 2 or total.kwargs:
        return None
    mean, eps = total.args
    if isinstance(mean, float):
        mean, eps = eps, mean
    if not isinstance(mean, fx.Node) or not isinstance(eps, float) or mean.target not in (torch.mean, "mean"):
        return None
    dims = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
    row = dims in (-1, (-1,), [-1]) and (mean.kwargs.get("keepdim") is True or mean.args[2:] == (True,))
    square = mean.args[0]
    if not row or mean.kwargs.get("dtype") is not None or not isinstance(square, fx.Node):
        return None
    squared = square.target in (torch.pow, "pow", operator.pow) and square.args == (wide, 2)
    return eps if squared or (square.target in _MUL and square.args == (wide, wide)) else None


def _written(graph: fx.Graph) -> set[int | None]:
    """Memory that some node writes to: what is read from it must be read where it is."""
    return {_storage(node.args[0]) for node in graph.nodes if node.args and _writes(node)}


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in _WRITING or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def _storage(node: Any) -> int | None:
    value = _value(node) if isinstance(node, fx.Node) else None
    return None if value is None else value.untyped_storage()._cdata


def _operands(node: fx.Node, targets: Sequence[Any]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Both orders of the two tensors that `node` adds or multiplies."""
    if node.target in targets and len(node.args) == 2 and not node.kwargs:
        one, other = node.args
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            yield one, other
            yield other, one


def _cast(node: fx.Node) -> fx.Node | None:
    """What `node` is another type of."""
    if node.op == "call_method" and node.target in _CASTS and isinstance(node.args[0], fx.Node):
        given, own = _value(node.args[0]), _value(node)
        if given is not None and own is not None and given.device == own.device:
            return node.args[0]
    return None


def _same_form(*nodes: fx.Node) -> bool:
    """Whether they have the same type and shape, symbols by their names: nothing is to be guarded for it."""
    values = [_value(node) for node in nodes]
    forms = {None if value is None else (value.dtype, value.device, tuple(map(str, value.shape))) for value in values}
    return len(forms) == 1 and None not in forms


def _value(node: fx.Node) -> torch.Tensor | None:
    """An example of the tensor that `node` makes."""
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None
