"""Compiles a model's decoder layers, and the modules that a step runs once around them: final norm, rotary embedding.

Gain: eager, the modules around the layers are some twenty kernels of a microsecond or two, which every replay of a
captured step would pay for; a layer's elementwise work is fused beside its products. Switch: `engine.compile`.

The modules around the layers are found by what a step calls and not by name. Nothing depends on their compiled code:
a module that does not compile, gives other numbers when tried, or fails in a later step, runs its own code again.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.model.optimize.decoder_layers import decoder_layers
from engine.model.optimize.fusion_passes import FusionBackend

log = logging.getLogger(__name__)

MAX_VARIANTS = 64  # of a layer's compiled code: kinds of layers, each of two models, for skinny steps and others
TRIED_TOKENS = 61  # of the recorded step: no width of a model, which the compiler would take for the same symbol
EXACT_TOLERANCE = 1e-4  # of a tensor's largest number, in float32
HALF_TOLERANCE = 2e-2  # the same in half precision, which compiled code rounds to less often
MAX_REASON_CHARS = 300  # of a compiler's message in the log


def compile_layers(module: nn.Module, attentions: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Compiles each decoder layer in place. Layers share their code, so that the compiler's work does not grow with
    depth.

    Args:
        module: The model.
        attentions: Its attention modules, in layer order.
        backend: Passed to `torch.compile`.

    Raises:
        ValueError: The layers are in no module list.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_VARIANTS)
    config.specialize_float = True  # an epsilon is a constant of the code, by which a fusion pass knows a norm
    for layer in decoder_layers(module, attentions):
        layer.compile(fullgraph=True, dynamic=True, backend=FusionBackend(backend))


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """Holds copies of the arguments that a module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "RecordedCall":
        return cls(tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()})

    def to(self, function: Callable[..., Any]) -> Any:
        """Calls `function` with copies of the arguments, since it may write to them."""
        again = RecordedCall.of(self.args, self.kwargs)
        return function(*again.args, **again.kwargs)


@dataclass(frozen=True, slots=True)
class RecordedModule:
    """Holds a module that stands around the decoder layers, and how a step called it."""

    name: str
    module: nn.Module
    calls: list[RecordedCall] = field(default_factory=list)


class _Compiled:
    """Replaces a module's `forward` by compiled code until that fails; then the module has its own again."""

    def __init__(self, name: str, module: nn.Module, backend: str) -> None:
        self._name, self._module = name, module
        self._own: Callable[..., Any] = module.forward
        self._compiled: Callable[..., Any] = torch.compile(self._own, fullgraph=True, dynamic=True, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:  # the compiler, and code that it made, may raise anything
            self._retreat(f"{type(error).__name__}: {error}")
        return self._own(*args, **kwargs)

    def adopt(self, calls: Sequence[RecordedCall]) -> bool:
        """Replaces the module's `forward`; returns whether it gives in these calls what the module's own code gives."""
        self._module.__dict__["forward"] = self  # found before the class's own, which is back when this is deleted
        for call in calls:
            if not _alike(call.to(self), call.to(self._own)):
                self._retreat("compiled, it gives other numbers")
        return self._stands

    @property
    def _stands(self) -> bool:
        return vars(self._module).get("forward") is self

    def _retreat(self, reason: str) -> None:
        if self._stands:
            del self._module.__dict__["forward"]
            kind, line = type(self._module).__name__, " ".join(reason.split())[:MAX_REASON_CHARS]
            log.warning("`%s` (%s) runs uncompiled: %s", self._name, kind, line)


def record_outer_modules(
    module: nn.Module, attentions: Sequence[nn.Module], step: Callable[[], object]
) -> list[RecordedModule]:
    """Runs a step and records the calls of the modules around the decoder layers.

    These are the children of the module that owns the list of layers, if they have no matrix among their parameters
    (embeddings, projections and the head have one) and no layer calls them.

    Args:
        module: The model, whose layers must not be compiled yet: compiled code would hold the hooks.
        attentions: Its attention modules, in layer order.
        step: Runs one step of up to TRIED_TOKENS tokens.

    Raises:
        ValueError: The layers are in no module list.
    """
    layers = decoder_layers(module, attentions)
    recorded = [RecordedModule(name, child) for name, child in _small_children(module, layers[0])]
    inside: list[nn.Module] = []  # the layers that run now
    shared: set[nn.Module] = set()  # modules that layers call: part of the layers' compiled code
    hooks = [layer.register_forward_pre_hook(lambda layer, _: inside.append(layer)) for layer in layers]
    hooks += [layer.register_forward_hook(lambda *_: _drop_last(inside)) for layer in layers]

    def note(one: RecordedModule) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if inside:
                shared.add(called)
            else:
                one.calls.append(RecordedCall.of(args, kwargs))

        return hook

    hooks += [one.module.register_forward_pre_hook(note(one), with_kwargs=True) for one in recorded]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return [one for one in recorded if one.calls and one.module not in shared]


@torch.no_grad()
def compile_outer_modules(recorded: Sequence[RecordedModule], backend: str = "inductor") -> list[str]:
    """Compiles these modules in place, as code for any number of tokens.

    Returns:
        The names of those that keep their compiled code, which has given the same in the recorded calls.
    """
    return [
        one.name
        for one in recorded
        if _makes_something(one) and _Compiled(one.name, one.module, backend).adopt(one.calls)
    ]


def _makes_something(one: RecordedModule) -> bool:
    """Returns false for a module that gives back its arguments, as dropout does: there is nothing to compile."""

    def given_back(*args: Any, **kwargs: Any) -> bool:
        made = one.module(*args, **kwargs)
        return any(made is given for given in (*args, *kwargs.values()))

    return not all(call.to(given_back) for call in one.calls)


def _small_children(module: nn.Module, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the children without matrices of the module that owns the list of `layer`."""
    for owner in module.modules():
        children = dict(owner.named_children())
        if any(isinstance(child, nn.ModuleList) and layer in set(child) for child in children.values()):
            for name, child in children.items():
                matrices = any(parameter.dim() > 1 for parameter in child.parameters())
                if not matrices and not isinstance(child, nn.ModuleList) and "forward" not in vars(child):
                    yield name, child
            return


def _drop_last(inside: list[nn.Module]) -> None:
    inside.pop()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _alike(found: Any, wanted: Any) -> bool:
    """Returns whether tensors, or tuples and lists of them, have the same form and differ by rounding alone."""
    if isinstance(wanted, tuple | list):
        same = isinstance(found, tuple | list) and len(found) == len(wanted)
        return same and all(map(_alike, found, wanted))
    if not (isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor)):
        return False
    if (found.shape, found.dtype, found.device) != (wanted.shape, wanted.dtype, wanted.device):
        return False
    if not wanted.numel():
        return True
    apart = (found.float() - wanted.float()).abs().amax()
    tolerance = HALF_TOLERANCE if wanted.dtype in (torch.bfloat16, torch.float16) else EXACT_TOLERANCE
    return bool(apart <= tolerance * wanted.float().abs().amax())
