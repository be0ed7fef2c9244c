"""Trains one model: the configurations of the built-in pair, the weighted loss, and one update."""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tools.builtin_model import vocabulary
from tools.builtin_model.corpus import LABEL_WEIGHT

LEARNING_RATE: Final = 2.5e-3
WARM_UP_STEPS: Final = 300
WEIGHT_DECAY: Final = 0.1
Z_LOSS: Final = 1e-3  # times the squared log-sum-exp: bfloat16 is coarse far from zero
NOISE: Final = 0.1  # of each number after a layer; a bfloat16 rounding is at most 0.002 of it


def target_config(hidden: int = 128) -> Qwen3Config:
    """Returns the target's configuration: 1.25 M parameters at hidden 128."""
    return _config(hidden=hidden, layers=4, heads=4, kv_heads=2, inter=384)


def draft_config() -> Qwen3Config:
    """Returns the draft's configuration: 0.19 M parameters."""
    return _config(hidden=64, layers=1, heads=2, kv_heads=1, inter=192)


def _config(*, hidden: int, layers: int, heads: int, kv_heads: int, inter: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary.SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=inter,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[vocabulary.EOS_ID, vocabulary.END_ID],
        pad_token_id=vocabulary.PAD_ID,
    )


def hidden_states(model: PreTrainedModel, ids_BL: torch.Tensor) -> torch.Tensor:
    """Returns final hidden states [B, L, hidden]; the mapping in place of a mask leaves attention causal."""
    states: torch.Tensor = model.model(
        input_ids=ids_BL, attention_mask={"full_attention": None}, use_cache=False
    ).last_hidden_state
    return states


def weighted_loss(model: PreTrainedModel, ids_BL: torch.Tensor, weights_BL: torch.Tensor) -> torch.Tensor:
    """Returns float32 [2], in nats: the minimised loss, and the mean cross entropy over the labels.

    Minimised is the weighted mean over all tokens of the cross entropy and the z-loss (Chowdhery et al. 2022, PaLM,
    section 5), which keeps logits near log-probabilities, so small.
    """
    logits = model.lm_head(hidden_states(model, ids_BL)[:, :-1]).float()
    log_sums = logits.logsumexp(-1)
    each = log_sums - logits.gather(-1, ids_BL[:, 1:, None])[..., 0]
    weights = weights_BL[:, 1:]
    labels = (weights >= LABEL_WEIGHT).float()
    minimised = ((each + Z_LOSS * log_sums.square()) * weights).sum() / weights.sum()
    return torch.stack([minimised, (each * labels).sum() / labels.sum().clamp_min(1)])


def blur(layer: torch.nn.Module, args: tuple[Any, ...], states: torch.Tensor) -> torch.Tensor:
    """Changes a layer's states by a random part NOISE of each number while gradients are made (a forward hook).

    A best token that hangs on the last bits of a state costs loss here, so it moves less under bfloat16 later.
    """
    return states * (1 + NOISE * torch.randn_like(states)) if torch.is_grad_enabled() else states


class Learner:
    """Holds a model, its optimizer and its compiled loss."""

    def __init__(self, name: str, config: Qwen3Config, device: torch.device, *, compiled: bool) -> None:
        self.name, self.device, self.steps = name, device, 0
        self.model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").to(device).train()
        for layer in self.model.model.layers:
            layer.register_forward_hook(blur)
        decayed = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        plain = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}],
            lr=LEARNING_RATE,
            betas=(0.9, 0.98),
            fused=device.type == "cuda",
        )
        self.loss: Callable[..., torch.Tensor] = weighted_loss
        if compiled:
            self.loss = torch.compile(weighted_loss, dynamic=False)

    def step(self, ids_BL: torch.Tensor, weights_BL: torch.Tensor, progress: float) -> torch.Tensor:
        """Makes one update; returns the losses [2] on the device."""
        rate = LEARNING_RATE * min(1.0, (self.steps + 1) / WARM_UP_STEPS) * _cosine(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = self._losses(ids_BL, weights_BL)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return losses.detach()

    def _losses(self, ids_BL: torch.Tensor, weights_BL: torch.Tensor) -> torch.Tensor:
        """Returns the losses, and accumulates their gradients."""
        try:
            return self._backward(ids_BL, weights_BL)
        except torch._dynamo.exc.TorchDynamoException as error:  # no compiler here: slower, but the run is not lost
            if self.loss is weighted_loss:
                raise
            print(f"{self.name}: compiling failed, going on without: {str(error)[:500]}", flush=True)
            self.loss = weighted_loss
            self.optimizer.zero_grad(set_to_none=True)
            return self._backward(ids_BL, weights_BL)

    def _backward(self, ids_BL: torch.Tensor, weights_BL: torch.Tensor) -> torch.Tensor:
        with autocast(self.device):
            losses = self.loss(self.model, ids_BL, weights_BL)
        torch.autograd.backward(losses[0])
        return losses


def autocast(device: torch.device) -> torch.autocast:
    """Returns a context of bfloat16 autocast on CUDA, and of none elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
