"""Training steps in the form of Megatron-LM, for the models of transformers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.megatron.plugin import MegatronLMPlugin
from trainwright.strategies.shards import whole_output

_IGNORED = -100


class AbstractTrainStep(ABC):
    """Base class of training steps for `MegatronLMPlugin(custom_train_step_class=…)`.

    Args:
        name: Of the step.

    Attributes:
        forward_step: `forward_step(data_iterator, model)` returns the output and a function from it to the loss and a
            dict of values.
    """

    forward_step: Callable[[Iterator[Any], Callable[..., Any]], tuple[Any, Callable[[Any], tuple[Any, dict[str, Any]]]]]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any = None, megatron_dataset_flag: bool = False) -> Callable[..., Any]:
        """Return a function from the iterator of batches to the model's arguments."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return `forward_step`."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any = None) -> Callable[..., Any]:
        """Return a function to the loss and a dict of values."""


class _TransformersStep(AbstractTrainStep):
    """The step of a model of transformers. A subclass may override each of the three methods.

    Args:
        args: The options of `MegatronLMPlugin`; an accelerator may precede them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(type(self).__name__)
        self.args = options = args[-1]
        owner = args[0] if len(args) > 1 else None
        self.get_batch = options.custom_get_batch_function or _call(
            self.get_batch_func, owner, options.megatron_dataset_flag
        )
        self.loss_func = options.custom_loss_function or _call(self.get_loss_func, owner)
        self.forward_step = _call(self.get_forward_step_func)

    def get_loss_func(self, accelerator: Any = None) -> Callable[..., Any]:
        def loss_func(loss_mask: torch.Tensor, output: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            losses, logits = output if isinstance(output, tuple) else (output, None)
            loss = _masked_mean(losses, loss_mask)
            return loss, {"lm loss": loss.detach(), **({} if logits is None else {"logits": logits})}

        return loss_func

    @staticmethod
    @abstractmethod
    def call_model(model: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        """Call a model of transformers with the arguments of Megatron-LM's; return its result and the logits."""


class GPTTrainStep(_TransformersStep):
    """The step of a causal language model: `model(tokens, position_ids, attention_mask, labels=labels)`."""

    def get_batch_func(self, accelerator: Any = None, megatron_dataset_flag: bool = False) -> Callable[..., Any]:
        def get_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
            data = next(data_iterator)
            tokens = data["input_ids"]
            given = data.get("labels", tokens)
            labels = torch.cat([given[:, 1:], torch.full_like(given[:, :1], _IGNORED)], 1)
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return tokens, labels, (labels != _IGNORED).float(), data.get("attention_mask"), positions

        return get_batch

    def get_forward_step_func(self) -> Callable[..., Any]:
        def forward_step(data_iterator: Iterator[Any], model: Callable[..., Any]) -> tuple[Any, Any]:
            tokens, labels, loss_mask, attention_mask, positions = self.get_batch(data_iterator)
            return model(tokens, positions, attention_mask, labels=labels), partial(self.loss_func, loss_mask)

        return forward_step

    @staticmethod
    def call_model(
        model: Callable[..., Any], tokens: Any, positions: Any = None, mask: Any = None, *, labels: Any = None
    ) -> tuple[Any, torch.Tensor]:
        logits = _logits(model(**_given(input_ids=tokens, position_ids=positions, attention_mask=mask)))
        return (logits if labels is None else _token_losses(logits, labels)), logits


class BertTrainStep(_TransformersStep):
    """The step of an encoder: `model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)`.

    Labels for each token are pre-training, possibly with `next_sentence_label`; labels for each row are classes.
    """

    def get_batch_func(self, accelerator: Any = None, megatron_dataset_flag: bool = False) -> Callable[..., Any]:
        def get_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
            data = next(data_iterator)
            labels = data["labels"]
            mask = (labels != _IGNORED).float() if labels.shape == data["input_ids"].shape else None
            order = data.get("next_sentence_label")
            return data["input_ids"], data.get("token_type_ids"), order, mask, labels, data.get("attention_mask")

        return get_batch

    def get_loss_func(
        self, accelerator: Any = None, pretraining_flag: bool = True, num_labels: int = 2
    ) -> Callable[..., Any]:
        def pretraining(loss_mask: Any, sentence_order: Any, output: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            losses, order_logits, *_ = output
            loss = _masked_mean(losses, loss_mask)
            found = {"lm loss": loss.detach()}
            if sentence_order is not None and order_logits is not None:
                of_order = cross_entropy(order_logits.float(), sentence_order.view(-1))
                loss, found["sop loss"] = loss + of_order, of_order.detach()
            return loss, found

        def finetuning(labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            if logits.shape[-1] == 1:
                loss = nn.functional.mse_loss(logits.float().view(-1), labels.float().view(-1))
            elif labels.is_floating_point():
                loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
            else:
                loss = cross_entropy(logits.float(), labels.view(-1))
            return loss, {"loss": loss.detach(), "logits": logits}

        return lambda *values: (pretraining if len(values) == 3 else finetuning)(*values)

    def get_forward_step_func(self, pretraining_flag: bool = True, bert_binary_head: bool = True) -> Callable[..., Any]:
        def forward_step(data_iterator: Iterator[Any], model: Callable[..., Any]) -> tuple[Any, Any]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            if loss_mask is None:
                return model(tokens, padding_mask, tokentype_ids=types), partial(self.loss_func, labels)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, order)

        return forward_step

    @staticmethod
    def call_model(
        model: Callable[..., Any], tokens: Any, mask: Any = None, *, tokentype_ids: Any = None, lm_labels: Any = None
    ) -> tuple[Any, torch.Tensor]:
        output = model(**_given(input_ids=tokens, attention_mask=mask, token_type_ids=tokentype_ids))
        logits = _logits(output, "prediction_logits", "logits")
        if lm_labels is None:
            return logits, logits
        order = output.get("seq_relationship_logits")
        return (_token_losses(logits, lm_labels), None if order is None else whole_output(order)), logits


class T5TrainStep(_TransformersStep):
    """The step of an encoder and a decoder: `model(tokens_enc, tokens_dec, enc_mask, …, lm_labels=labels)`."""

    def get_batch_func(self, accelerator: Any = None, megatron_dataset_flag: bool = False) -> Callable[..., Any]:
        def get_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
            data = next(data_iterator)
            labels = data["labels"]
            decoder, mask = data.get("decoder_input_ids"), data.get("attention_mask")
            if decoder is None:  # the labels, after the token that starts a sequence
                start = torch.full_like(labels[:, :1], self.args.decoder_start_token_id)
                decoder = torch.cat([start, labels[:, :-1].clamp_min(0)], 1)
            decoder_mask = data.get("decoder_attention_mask")
            return data["input_ids"], decoder, (labels != _IGNORED).float(), labels, mask, decoder_mask, mask

        return get_batch

    def get_forward_step_func(self) -> Callable[..., Any]:
        def forward_step(data_iterator: Iterator[Any], model: Callable[..., Any]) -> tuple[Any, Any]:
            encoder, decoder, loss_mask, labels, *masks = self.get_batch(data_iterator)
            output = model(encoder, decoder, *masks, tokentype_ids=None, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step

    @staticmethod
    def call_model(
        model: Callable[..., Any],
        tokens_enc: Any,
        tokens_dec: Any,
        enc_mask: Any = None,
        dec_mask: Any = None,
        enc_dec_mask: Any = None,
        *,
        tokentype_ids: Any = None,
        lm_labels: Any = None,
    ) -> tuple[Any, torch.Tensor]:
        given = _given(attention_mask=enc_mask, decoder_attention_mask=dec_mask)
        logits = _logits(model(input_ids=tokens_enc, decoder_input_ids=tokens_dec, **given))
        return (logits if lm_labels is None else _token_losses(logits, lm_labels)), logits


_KINDS: dict[str, type[_TransformersStep]] = {"bert": BertTrainStep, "t5": T5TrainStep}


def make_train_step(plugin: MegatronLMPlugin, model: nn.Module) -> AbstractTrainStep:
    """Return the step that a plugin describes, for a model of transformers."""
    config: Any = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", "gpt"))
    own = next((step for name, step in _KINDS.items() if name in kind), GPTTrainStep)
    args = SimpleNamespace(
        **plugin.to_dict(),
        eos_token_id=getattr(config, "eos_token_id", None),
        decoder_start_token_id=getattr(config, "decoder_start_token_id", 0),
        vocab_file=None,
        model_return_dict=True,
    )
    found = (plugin.custom_train_step_class or own)(args, **(plugin.custom_train_step_kwargs or {}))
    if not isinstance(found, AbstractTrainStep):
        raise ConfigurationError(f"custom_train_step_class={type(found).__name__} is not an AbstractTrainStep.")
    if not hasattr(found, "forward_step"):
        found.forward_step = _call(found.get_forward_step_func)
    return found


def model_of_step(step: AbstractTrainStep, model: Callable[..., Any], return_logits: bool) -> Callable[..., Any]:
    """Return what a step calls as its model: with the arguments of Megatron-LM's model, unless the step has its own."""
    if not isinstance(step, _TransformersStep):
        return model

    def call(*args: Any, **kwargs: Any) -> Any:
        found, logits = step.call_model(model, *args, **kwargs)
        return (found, logits) if return_logits and isinstance(found, torch.Tensor) and found is not logits else found

    return call


def _call(function: Callable[..., Any], *values: Any) -> Any:
    """Call a method that a subclass may have written with fewer arguments."""
    return function(*values[: len(inspect.signature(function).parameters)])


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _logits(output: Any, *names: str) -> torch.Tensor:
    found: torch.Tensor = next(output[name] for name in names or ("logits",) if name in output)
    return whole_output(found)


def _token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.float().transpose(1, 2), labels, reduction="none", ignore_index=_IGNORED)


def _masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.view(-1).float()
    return (losses.float().view(-1) * mask).sum() / mask.sum()
