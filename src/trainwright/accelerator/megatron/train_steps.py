"""Training steps with the interface of Megatron-LM, for models of the library transformers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from trainwright.strategies.megatron.plugin import MegatronLMPlugin
from trainwright.strategies.shards import full_output

Loss = tuple[torch.Tensor, dict[str, Any]]
_IGNORED = -100


class AbstractTrainStep(ABC):
    """Base class of training steps for `MegatronLMPlugin(custom_train_step_class=…)`.

    Args:
        name: Name of the step.

    Attributes:
        forward_step: `forward_step(data_iterator, model)` returns the model's output, and a function that computes the
            loss and a dict of logged values from this output.
    """

    forward_step: Callable[[Iterator[Any], Callable[..., Any]], tuple[Any, Callable[[Any], Loss]]]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: object = None, megatron_dataset_flag: bool = False) -> Callable[..., Any]:
        """Return a function that reads the next batch of an iterator and returns the model's arguments."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return `forward_step`."""

    @abstractmethod
    def get_loss_func(self, accelerator: object = None) -> Callable[..., Any]:
        """Return a function that computes the loss and a dict of logged values from the model's output."""


class GPTTrainStep(AbstractTrainStep):
    """The step of a causal language model: `model(tokens, position_ids, attention_mask, labels=labels)`.

    Args:
        args: The options of `MegatronLMPlugin`. An Accelerator may be passed before the options.
    """

    # The names in transformers of the positional arguments of Megatron-LM's model.
    _names: ClassVar[tuple[str, ...]] = ("input_ids", "position_ids", "attention_mask")
    _has_order: ClassVar[bool] = False  # the model may predict the order of sentences, too

    def __init__(self, *args: Any) -> None:
        super().__init__(type(self).__name__)
        options = args[-1]
        self.args = options
        accelerator = args[0] if len(args) > 1 else None
        get_batch = _call(self.get_batch_func, accelerator, options.megatron_dataset_flag)
        self.get_batch = options.custom_get_batch_function or get_batch
        self.loss_func = options.custom_loss_function or _call(self.get_loss_func, accelerator)
        self.forward_step = _call(self.get_forward_step_func)

    def get_batch_func(self, accelerator: object = None, megatron_dataset_flag: bool = False) -> Callable[..., Any]:
        return lambda data_iterator: self._batch(next(data_iterator))

    def get_forward_step_func(self, *_: object, **__: object) -> Callable[..., Any]:
        return self._forward

    def get_loss_func(self, accelerator: object = None, *_: object, **__: object) -> Callable[..., Any]:
        return self._loss

    def _batch(self, data: dict[str, Any]) -> tuple[Any, ...]:
        """Return the tokens, labels, mask of the loss, attention mask and positions, as in Megatron-LM."""
        tokens = data["input_ids"]
        unshifted = data.get("labels", tokens)
        # The label of a token is the next token: [1, 2, 3] becomes [2, 3, ignored].
        labels = torch.cat([unshifted[:, 1:], torch.full_like(unshifted[:, :1], _IGNORED)], 1)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return tokens, labels, (labels != _IGNORED).float(), data.get("attention_mask"), positions

    def _forward(self, data_iterator: Iterator[Any], model: Callable[..., Any]) -> tuple[Any, Callable[..., Loss]]:
        tokens, labels, loss_mask, attention_mask, positions = self.get_batch(data_iterator)
        return model(tokens, positions, attention_mask, labels=labels), partial(self.loss_func, loss_mask)

    def _loss(self, loss_mask: torch.Tensor, output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Loss:
        losses, logits = output if isinstance(output, tuple) else (output, None)
        loss = _masked_mean(losses, loss_mask)
        logged: dict[str, Any] = {"lm loss": loss.detach()}
        if logits is not None:
            logged["logits"] = logits
        return loss, logged

    def call_model(
        self,
        model: Callable[..., Any],
        return_logits: bool,
        *values: object,
        labels: torch.Tensor | None = None,
        lm_labels: torch.Tensor | None = None,
        tokentype_ids: torch.Tensor | None = None,
    ) -> Any:
        """Call a transformers model with the arguments of Megatron-LM's model. Return the loss of each token.

        With `return_logits`, the result is the losses and the logits. For an encoder, it is the losses and the logits
        of the order of sentences, or None. Without labels, it is the logits.
        """
        arguments = dict(zip(self._names, values, strict=False), token_type_ids=tokentype_ids)
        output = model(**{name: value for name, value in arguments.items() if value is not None})
        name_of_logits = "prediction_logits" if "prediction_logits" in output else "logits"
        logits = full_output(output[name_of_logits])
        if labels is None:
            labels = lm_labels
        if labels is None:
            return logits
        losses = cross_entropy(logits.float().transpose(1, 2), labels, reduction="none", ignore_index=_IGNORED)
        if self._has_order:
            order = output.get("seq_relationship_logits")
            return losses, None if order is None else full_output(order)
        return (losses, logits) if return_logits else losses


class BertTrainStep(GPTTrainStep):
    """The step of an encoder: `model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)`.

    With one label per token, the step is that of pre-training, optionally with `next_sentence_label`. With one label
    per row, the labels are classes.
    """

    _names = ("input_ids", "attention_mask")
    _has_order = True

    def _batch(self, data: dict[str, Any]) -> tuple[Any, ...]:
        """Return the tokens, types, label of the order, mask of the loss, labels and padding mask, as in Megatron-LM.

        The mask of the loss is None if the labels are classes.
        """
        labels = data["labels"]
        order = data.get("next_sentence_label")
        mask = (labels != _IGNORED).float() if labels.shape == data["input_ids"].shape else None
        return data["input_ids"], data.get("token_type_ids"), order, mask, labels, data.get("attention_mask")

    def _forward(self, data_iterator: Iterator[Any], model: Callable[..., Any]) -> tuple[Any, Callable[..., Loss]]:
        tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
        if loss_mask is None:
            return model(tokens, padding_mask, tokentype_ids=types), partial(self.loss_func, labels)
        output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
        return output, partial(self.loss_func, loss_mask, order)

    def _loss(self, *values: Any) -> Loss:
        """Return the loss of pre-training (mask, order, output) or of classification (labels, output)."""
        if len(values) == 3:
            loss_mask, sentence_order, (losses, order_logits) = values
            loss = _masked_mean(losses, loss_mask)
            logged: dict[str, Any] = {"lm loss": loss.detach()}
            if sentence_order is not None and order_logits is not None:
                loss_of_order = cross_entropy(order_logits.float(), sentence_order.view(-1))
                loss = loss + loss_of_order
                logged["sop loss"] = loss_of_order.detach()
            return loss, logged
        labels = values[0]
        logits = values[1].float()
        if logits.shape[-1] == 1:
            loss = mse_loss(logits.view(-1), labels.float().view(-1))
        elif labels.is_floating_point():
            loss = binary_cross_entropy_with_logits(logits, labels)
        else:
            loss = cross_entropy(logits, labels.view(-1))
        return loss, {"loss": loss.detach(), "logits": logits}


class T5TrainStep(GPTTrainStep):
    """The step of an encoder and a decoder: `model(tokens_enc, tokens_dec, enc_mask, …, lm_labels=labels)`."""

    _names = ("input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask")

    def _batch(self, data: dict[str, Any]) -> tuple[Any, ...]:
        """Return both parts' tokens, the mask of the loss, the labels, and three attention masks, as in Megatron-LM.

        The masks are those of the encoder, the decoder, and the decoder's attention to the encoder.
        """
        labels = data["labels"]
        decoder = data.get("decoder_input_ids")
        mask = data.get("attention_mask")
        if decoder is None:  # the labels, after the token that starts a sequence
            start = torch.full_like(labels[:, :1], self.args.decoder_start_token_id)
            decoder = torch.cat([start, labels[:, :-1].clamp_min(0)], 1)
        decoder_mask = data.get("decoder_attention_mask")
        return data["input_ids"], decoder, (labels != _IGNORED).float(), labels, mask, decoder_mask, mask

    def _forward(self, data_iterator: Iterator[Any], model: Callable[..., Any]) -> tuple[Any, Callable[..., Loss]]:
        encoder, decoder, loss_mask, labels, *masks = self.get_batch(data_iterator)
        output = model(encoder, decoder, *masks, tokentype_ids=None, lm_labels=labels)
        return output, partial(self.loss_func, loss_mask)


def make_train_step(plugin: MegatronLMPlugin, model: nn.Module) -> AbstractTrainStep:
    """Return the step that a plugin describes, for a model of transformers."""
    config: Any = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", "gpt"))
    default_class = GPTTrainStep
    if "bert" in kind:
        default_class = BertTrainStep
    elif "t5" in kind:
        default_class = T5TrainStep
    step_class: Callable[..., AbstractTrainStep] = plugin.custom_train_step_class or default_class
    args = SimpleNamespace(
        **plugin.to_dict(),
        eos_token_id=getattr(config, "eos_token_id", None),
        decoder_start_token_id=getattr(config, "decoder_start_token_id", 0),
        vocab_file=None,
        model_return_dict=True,
    )
    return step_class(args, **(plugin.custom_train_step_kwargs or {}))


def _call(function: Callable[..., Any], *values: object) -> Any:
    """Call a function with the leading `values` that it accepts, because a subclass's method may accept fewer."""
    return function(*values[: len(inspect.signature(function).parameters)])


def _masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the elements where `mask` is 1."""
    mask = mask.view(-1).float()
    return (losses.float().view(-1) * mask).sum() / mask.sum()
