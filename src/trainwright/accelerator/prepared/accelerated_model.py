"""Prepared models: wrappers with the state dict and the attributes of the user's model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.tree import map_tensors
from trainwright.generation.continuations import generate
from trainwright.strategies.engine import PreparedModel
from trainwright.strategies.units import is_compiled_module

_NARROW = (torch.float16, torch.bfloat16)


class AcceleratedModel(nn.Module):
    """Wrapper of a model that connects the processes, or computes in mixed precision.

    The state dict has the names of the user's model. Missing attributes are read from `prepared.attributes`.

    Args:
        module: The user's model.
        prepared: What the engine has made of the model.
        call: What a forward calls: `prepared.call`, or a compiled form of it.
        make_context: Function that creates the context of a forward. Outputs of fp16 or bf16 are then cast to float32.
            None: no context, and outputs keep their dtype.
        explain: See `Engine.explain_error`.
        no_sync: See `Engine.no_sync`.

    Attributes:
        module, prepared, call, make_context: The arguments.
    """

    _is_accelerate_prepared = True  # Accelerate's mark, which programs read

    def __init__(
        self,
        module: nn.Module,
        prepared: PreparedModel,
        call: Callable[..., Any],
        make_context: Callable[[], AbstractContextManager[Any]] | None,
        explain: Callable[[BaseException, nn.Module], Exception | None],
        no_sync: Callable[[Callable[..., Any]], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.module = module
        self.make_context = make_context
        self.prepared = prepared
        self._explain = explain
        self._no_sync = no_sync
        # Not by setattr, which would make a module a child: its parameters are those of `module`.
        vars(self).update(call=call)
        self._num_forwards = 0  # forwards of this object that run now; several if they are nested
        # Handle of a hook that refuses training calls of `module` without its wrapper. None without a wrapper of torch.
        self._guard: Any = None
        if isinstance(prepared.call, nn.Module) and prepared.call is not module:
            self._guard = module.register_forward_pre_hook(partial(_refuse_direct_call, weakref.ref(self)))

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the model's forward. In training with several processes, collective."""
        self._num_forwards += 1
        try:
            if self.make_context is None:
                return self.call(*args, **kwargs)
            with self.make_context():
                output = self.call(*args, **kwargs)
        except RuntimeError as error:
            explained = self._explain(error, self.module)
            if explained is None:
                raise
            raise explained from error
        finally:
            self._num_forwards -= 1
        return map_tensors(_widened, output)  # only with a context

    def release(self) -> None:
        """Allow another object to wrap the same model, and a process to train it directly."""
        if self._guard is not None:
            self._guard.remove()

    @property
    def is_in_forward(self) -> bool:
        """True while a forward of this object runs."""
        return self._num_forwards > 0

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves gradients on this rank; see `Accelerator.no_sync`."""
        return self._no_sync(self.prepared.call)

    def train(self, mode: bool = True) -> AcceleratedModel:
        """Set training or evaluation mode. Return this object."""
        super().train(mode)
        if isinstance(self.prepared.call, nn.Module):
            self.prepared.call.training = mode  # a wrapper, such as DDP's, is not a child of this module
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the user's model. In the state dict of a parent module, names contain `module.`."""
        is_within_parent = args or kwargs.get("destination") is not None or kwargs.get("prefix")
        if is_within_parent:
            return super().state_dict(*args, **kwargs)
        return self.module.state_dict(**kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters of the user's model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and buffers of the user's model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict with the names of the user's model, on every rank."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def megatron_generate(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        *,
        top_p: float | None = None,
        top_p_decay: float = 0.0,
        add_BOS: bool = False,  # noqa: N803 -- the name in Accelerate
        **options: Any,
    ) -> torch.Tensor:
        """Continue prompts, with Accelerate's arguments. `options` are those of `trainwright.generation.generate`.

        Args:
            inputs: Prompts.
            attention_mask: Mask of the prompts.
            max_length: Length of a row with its prompt, if `max_new_tokens` is None. Default: None, which is 128.
            max_new_tokens: Number of tokens to add. Default: None, which follows from `max_length`.
            top_p: Probability mass of the tokens to sample from. Default: None, which is 1.
            top_p_decay: See `trainwright.generation.generate`. Default: 0, no decay.
            add_BOS: Insert the BOS token of the model's configuration before each prompt. Default: False.

        Raises:
            ConfigurationError: `add_BOS` is True, and the model's configuration has no BOS token.
        """
        bos_token = None
        if add_BOS:
            model_config = getattr(self.prepared.attributes, "config", None)
            bos_token = getattr(model_config, "bos_token_id", None)
            if bos_token is None:
                raise ConfigurationError("add_BOS=True needs bos_token_id in the model's configuration.")
        if max_new_tokens is None:
            max_new_tokens = (max_length or 128) - inputs.shape[1]
        options["top_p"] = 1.0 if top_p is None else top_p
        options["top_p_decay"] = top_p_decay or 1.0  # 1 is no decay for `generate`
        # In Accelerate, None means the default of an option.
        options = {name: value for name, value in options.items() if value is not None}
        return generate(self, inputs, attention_mask, max_new_tokens=max_new_tokens, bos_token=bos_token, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "prepared"):  # not set yet, while the object is unpickled
                raise
            return getattr(self.prepared.attributes, name)


def unwrapped(model: nn.Module, *, keep_torch_compile: bool) -> nn.Module:
    """Return the user's model without its wrappers: prepared models, torch's replicas and compiled modules.

    With `keep_torch_compile`, a compiled module that wraps the model is returned. `model` is not changed.
    """
    inner: Any = model
    compiled: Any = None  # the outermost module of torch.compile
    while True:
        if isinstance(inner, AcceleratedModel):
            if compiled is None and inner.call is not inner.prepared.call:
                compiled = inner.call
            inner = inner.module
        elif isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        elif is_compiled_module(inner):
            if compiled is None:
                compiled = inner
            inner = inner._orig_mod
        else:
            break
    user_model: nn.Module = inner
    if compiled is None or not keep_torch_compile:
        return user_model
    if compiled._orig_mod is user_model:
        return cast(nn.Module, compiled)
    # `compiled` wraps a wrapper of the model. It is not changed to wrap the model, because the loop may still train
    # through it. `dynamo_ctx` holds the options of the compilation.
    return cast(nn.Module, type(compiled)(user_model, compiled.dynamo_ctx))


def _refuse_direct_call(prepared: weakref.ref[AcceleratedModel], module: nn.Module, args: object) -> None:
    """Raise an error if a model that several processes train is called without its wrapper."""
    if torch.compiler.is_compiling():
        return
    wrapper = prepared()
    if wrapper is None or wrapper.is_in_forward:
        return
    trains = torch.is_grad_enabled() and module.training
    if not trains:
        return
    raise ConfigurationError(
        f"{type(module).__name__} was called directly or by one of its own methods, not through the model that "
        "prepare() returned: its gradients would not be averaged, and the weights of the processes would diverge. "
        "Call the prepared model, or this one under torch.no_grad() or in eval mode. If training with the Accelerator "
        "has ended and each process now trains the model alone, call accelerator.free_memory() first."
    )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor
