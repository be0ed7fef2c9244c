"""What a compiled decoder layer of few rows computes in fewer kernels than its own code has.

    r + narrow_linear(x, w)                        ->  narrow_linear(x, w, residual=r), where nothing else reads it
    attend(rotate(norm(q)), rotate(norm(k)), v)    ->  attend_rotating(q, k, v, ...)    with norms or without

A captured step of few rows spends a microsecond or three on every kernel, however little it does, and the host some on
its launch. What can be joined is found in the graph that the compiler is given (`graph_patterns`). Only graphs that
multiply few rows are looked at: in others these kernels are not what a step waits for. A sum has the bits of the
model's own code; norm and rotation are computed in float32 and rounded once, where that code rounds several times.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import engine.rotating_attention  # noqa: F401  # registers what graphs are given
from engine.graph_patterns import ADD, norm_of, operands, rotated, same_form, storage, transposed, written


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


def join(graph: fx.Graph) -> int:
    """Joins what it can, in place; how much that was. Nodes that nobody reads any more stay: the compiler knows which
    of them write to something."""
    ops = torch.ops.assay
    nodes = list(graph.nodes)
    if not any(node.target is ops.narrow_linear for node in nodes):
        return 0
    fixed = written(graph)
    joined = 0
    for node in nodes:
        if found := next(_residuals(node), None):
            product, residual = found
            if not {storage(product.args[0]), storage(residual)} & fixed:
                _replace(graph, node, ops.narrow_linear, (*product.args, residual))
                graph.erase_node(product)
                joined += 1
        heads = _rotations(node) if node.target is ops.attend else None
        if heads is not None and not set(map(storage, heads[:5])) & fixed:
            _replace(graph, node, ops.attend_rotating, (*heads, *node.args[3:]))
            joined += 1
    if joined:
        graph.lint()
    return joined


def _replace(graph: fx.Graph, node: fx.Node, op: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        whole = graph.call_function(op, args)
    whole.meta = dict(node.meta)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


def _residuals(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(product, what is added to it) where `node` is such a sum and its only reader."""
    for product, residual in operands(node, ADD):
        plain = product.target is torch.ops.assay.narrow_linear and len(product.args) == 4 and not product.args[3]
        if plain and len(product.users) == 1 and product is not residual and same_form(node, product, residual):
            yield product, residual


def _rotations(node: fx.Node) -> tuple[Any, ...] | None:
    """(q, k, v, cos, sin, norms of q and k, eps), [1, T, H or G, D] each of the first three, where `node` attends with
    queries and keys that are rotated alike."""
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
