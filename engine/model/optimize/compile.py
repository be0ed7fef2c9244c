"""Compiled code for what a step runs once, around the decoder layers: the final norm, the rotary embedding.

Eager they are some twenty kernels of a microsecond or two, which a captured step of few rows pays for at every replay.
They are found by what they do in a step and not by name, and nothing depends on their being compiled: what does not
compile, or gives other numbers when tried, or fails in a later step, runs its own code as before.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.model.cuda_graphs.decode import decoder_layers

log = logging.getLogger(__name__)

COMPILES_AROUND = True  # false: only decoder layers are compiled
TRIED_TOKENS = 61  # of the step that is listened to: the width of nothing, which the compiler would take for the same
EXACT_TOLERANCE = 1e-4  # of a tensor's largest number, in float32
HALF_TOLERANCE = 2e-2  # the same in half precision, which compiled code rounds to less often

MAX_REASON_CHARS = 300  # characters of what a compiler says


@dataclass(frozen=True, slots=True)
class _Call:
    """What a module was given, in memory of its own."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        return cls(tuple(map(_own, args)), {name: _own(value) for name, value in kwargs.items()})

    def to(self, function: Callable[..., Any]) -> Any:
        again = _Call.of(self.args, self.kwargs)  # a function may write to what it is given
        return function(*again.args, **again.kwargs)


@dataclass(frozen=True, slots=True)
class Heard:
    """A module that stands around the layers, and how a step called it."""

    name: str
    module: nn.Module
    calls: list[_Call] = field(default_factory=list)


class _Compiled:
    """Stands for `forward` of a module until it fails: from then on the module has its own again."""

    def __init__(self, name: str, module: nn.Module, backend: str) -> None:
        self._name, self._module = name, module
        self._own: Callable[..., Any] = module.forward
        self._compiled: Callable[..., Any] = torch.compile(self._own, fullgraph=True, dynamic=True, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:  # whatever the compiler, or code that it made, may raise
            self._retreat(f"{type(error).__name__}: {error}")
        return self._own(*args, **kwargs)

    def adopt(self, calls: Sequence[_Call]) -> bool:
        """Whether it gave in these calls what the module gives, and stands for it now."""
        self._module.__dict__["forward"] = self  # before its class's own; taken away, that is there again
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


def listen(module: nn.Module, attentions: Sequence[nn.Module], step: Callable[[], object]) -> list[Heard]:
    """What `step`, one step of TRIED_TOKENS tokens or less, calls around the layers. Before these are compiled.

    That is: children of the module that owns the list of layers, without a matrix among their parameters (embeddings,
    projections and the head have one), which no layer calls. Raises ValueError where layers are in no list.
    """
    layers = decoder_layers(module, attentions)
    if not COMPILES_AROUND:
        return []
    heard = [Heard(name, child) for name, child in _small_children(module, layers[0])]
    inside: list[nn.Module] = []  # the layers being run
    shared: set[nn.Module] = set()  # what they call: part of their own compiled code
    hooks = [layer.register_forward_pre_hook(lambda layer, _: inside.append(layer)) for layer in layers]
    hooks += [layer.register_forward_hook(lambda *_: _drop_last(inside)) for layer in layers]

    def note(one: Heard) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if inside:
                shared.add(called)
            else:
                one.calls.append(_Call.of(args, kwargs))

        return hook

    hooks += [one.module.register_forward_pre_hook(note(one), with_kwargs=True) for one in heard]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return [one for one in heard if one.calls and one.module not in shared]


@torch.no_grad()
def compile_around(heard: Sequence[Heard], backend: str = "inductor") -> list[str]:
    """Compiles these modules in place; the names of those that it kept so. Steps are told apart by nothing but their
    number of tokens, as in the layers."""
    return [
        one.name for one in heard if _makes_something(one) and _Compiled(one.name, one.module, backend).adopt(one.calls)
    ]


def _makes_something(one: Heard) -> bool:
    """Not so where it gives back what it is given, as dropout does: there is nothing to compile."""

    def given_back(*args: Any, **kwargs: Any) -> bool:
        made = one.module(*args, **kwargs)
        return any(made is given for given in (*args, *kwargs.values()))

    return not all(call.to(given_back) for call in one.calls)


def _small_children(module: nn.Module, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Of the owner of the list that begins with `layer`."""
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


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _alike(found: Any, wanted: Any) -> bool:
    """Of tensors, and of tuples and lists of them: numbers of the same types that differ by rounding."""
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
