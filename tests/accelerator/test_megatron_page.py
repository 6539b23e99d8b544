"""The page on Megatron-LM of Accelerate's documentation: its programs on two ranks, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, DistributedType, MegatronStrategy
from trainwright.core.errors import ConfigurationError
from trainwright.data import TokenFileWriter
from trainwright.utils import (
    BertTrainStep,
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    T5TrainStep,
    avg_losses_across_data_parallel_group,
)

transformers = pytest.importorskip("transformers")
_STEPS, _BATCH = 6, 4


def _gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    no_dropout = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, bos_token_id=1, eos_token_id=1))


def _rows(num: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 32, (num, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _reference(loss_of: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> tuple[list[float], float]:
    """Train in one process by hand: the losses, and that of evaluation."""
    model = _gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i, batch in enumerate(DataLoader(_rows(_STEPS * _BATCH), batch_size=_BATCH)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (i / 2 if i <= 2 else 1 - (i - 2) / (_STEPS - 2))
        loss = model(**batch).loss if loss_of is None else loss_of(model, batch["input_ids"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        batch = next(iter(DataLoader(_rows(_BATCH), batch_size=_BATCH)))
        found = model(**batch).loss if loss_of is None else loss_of(model, batch["input_ids"])
    return losses, found.item()


def _train(options: dict[str, Any], custom: bool, batch_size: int) -> tuple[list[float], float, Any]:
    """Train as on the page: `batch_size` rows for each of two micro-batches."""
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**options) if options else None, cpu=True)
    assert accelerator.distributed_type == DistributedType.MEGATRON_LM
    plugin = accelerator.state.megatron_lm_plugin
    assert plugin is accelerator.megatron_lm_plugin
    if custom:
        plugin.custom_train_step_class = GPTTrainStepWithCustomLoss
        plugin.custom_train_step_kwargs = {"keytoken_ids": [3, 5], "alpha": 0.25}
    model = _gpt2()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler: Any = MegatronLMDummyScheduler(optimizer=optimizer, total_num_steps=_STEPS, warmup_num_steps=2)
    train: Any = DataLoader(_rows(_STEPS * _BATCH), batch_size=batch_size)
    test: Any = DataLoader(_rows(_BATCH), batch_size=batch_size)
    model, optimizer, lr_scheduler, train, test = accelerator.prepare(model, optimizer, lr_scheduler, train, test)
    assert plugin.global_batch_size == _BATCH
    assert accelerator.prepare(train) is train
    assert len(train) == _STEPS
    losses, logits = [], None
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        logits = outputs.get("logits")
    model.eval()
    evals = []
    for batch in test:
        with torch.no_grad():
            evals.append(model(**batch).loss)
    return losses, torch.tensor(evals).mean().item(), None if logits is None else tuple(logits.shape)


class GPTTrainStepWithCustomLoss(GPTTrainStep):
    def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
        super().__init__(megatron_args)
        self.kwargs = kwargs

    def get_loss_func(self) -> Any:  # type: ignore[override]  # as on the page
        def loss_func(inputs: Any, loss_mask: Any, output_tensor: Any) -> Any:
            batch_size, seq_length = output_tensor.shape
            loss_mask = loss_mask.view(-1).float()
            loss = output_tensor.float().view(-1) * loss_mask
            per_sample = loss.view(batch_size, seq_length).sum(axis=1)
            per_sample = per_sample / loss_mask.view(batch_size, seq_length).sum(axis=1)
            weights = torch.stack([(inputs == kt).float() for kt in self.kwargs["keytoken_ids"]]).sum(axis=[0, 2])  # type: ignore[call-overload]
            weighted = (per_sample * (1.0 + self.kwargs["alpha"] * weights)).mean()
            averaged = avg_losses_across_data_parallel_group([weighted])
            return weighted, {"lm loss": averaged[0]}

        return loss_func

    def get_forward_step_func(self) -> Any:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
            return output_tensor, partial(self.loss_func, tokens, loss_mask)

        return forward_step


def _custom_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
    weights = ((tokens == 3) | (tokens == 5)).float().sum(1)
    return (losses * (1 + 0.25 * weights)).mean()


_WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "interleaved": ({"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1}, 2),
    "tp": ({"tp_degree": 2, "num_micro_batches": 2, "sequence_parallelism": True}, 2),
    "shards": ({"num_micro_batches": 2, "use_distributed_optimizer": True, "return_logits": True}, 1),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "custom"),
    [
        ("interleaved", True),
        pytest.param("tp", False, marks=pytest.mark.exhaustive),
        pytest.param("shards", True, marks=pytest.mark.exhaustive),
        ("shards", False),
    ],
)
def test_the_page_trains_as_one_process_does(way: str, custom: bool) -> None:
    options, batch_size = _WAYS[way]
    if custom:  # its loss function takes no logits
        options = {name: value for name, value in options.items() if name != "return_logits"}
    losses, test = _reference(_custom_loss if custom else None)
    for rank in run_distributed(_train, 2, options, custom, batch_size, init=False, timeout=120):
        assert rank[0] == pytest.approx(losses, rel=1e-4)
        assert rank[1] == pytest.approx(test, rel=1e-4)
        assert rank[2] == ((2, 8, 32) if "return_logits" in options else None)


# Values of options of Megatron-LM that have an effect there, and what the error says.
_REFUSED: dict[str, tuple[object, str]] = {
    "use_custom_fsdp": (True, "use_distributed_optimizer=True"),
    "overlap_cpu_optimizer_d2h_h2d": (True, "cpu_offload=True"),
    "no_load_optim": (True, "always include the optimizer"),
    "eod_mask_loss": (True, "set labels to -100"),
    "no_save_optim": (True, "always include the optimizer"),
    "optimizer_cpu_offload": (True, "cpu_offload=True"),
    "use_precision_aware_optimizer": (True, "choose an optimizer"),
    "decoder_last_pipeline_num_layers": (1, "split_points=…"),
    "recompute_method": ("block", "use 'uniform'"),
    "recompute_num_layers": (2, "use 1"),
    "expert_model_parallel_size": (2, "ep_size=…"),
    "context_parallel_size": (2, "ParallelismConfig.*splits sequences"),
    "attention_dropout": (0.1, "attn_pdrop=…"),
    "hidden_dropout": (0.1, "resid_pdrop=…"),
    "expert_tensor_parallel_size": (2, "ep_size=…"),
    "calculate_per_token_loss": (True, "counts by its rows"),
    "use_rotary_position_embeddings": (True, "determines its positions"),
    "pipeline_model_parallel_split_rank": (1, "use tp_degree"),
    "train_samples": (8, "use train_iters"),
    "lr_decay_samples": (8, "lr_decay_iters"),
    "lr_warmup_samples": (8, "lr_warmup_iters"),
    "consumed_samples": ([1, 0, 0], "load_state restores the position"),
    "no_wd_decay_cond": (print, "parameter groups"),
    "scale_lr_cond": (print, "parameter groups"),
    "lr_mult": (2.0, "parameter groups"),
    "tensorboard_dir": ("logs", "log_with='tensorboard'"),
    "set_all_logging_options": (True, "log_with='tensorboard'"),
    "custom_model_provider_function": (print, "build it in the script"),
    "custom_prepare_model_function": (print, "build it in the script"),
    "custom_megatron_datasets_provider_function": (print, "prepare a DataLoader"),
    "other_megatron_args": ({"position_embedding_type": "alibi"}, "configure position embeddings"),
    "recompute_granularity": ("ful", "Did you mean 'full'"),
    "lr_decay_style": ("linaer", "Did you mean 'linear'"),
    "weight_decay_incr_style": ("cosin", "Did you mean 'cosine'"),
}
# Values with which Megatron-LM does what Trainwright does.
_WITHOUT_EFFECT: dict[str, Any] = {
    **{name: False for name, (value, _) in _REFUSED.items() if value is True},
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "expert_tensor_parallel_size": 1,
    "lr_warmup_samples": 0,
    "consumed_samples": [0, 0, 0],
    "lr_mult": 1.0,
    "other_megatron_args": {},
}


def test_options_without_effect_are_accepted() -> None:
    assert MegatronLMPlugin(**_WITHOUT_EFFECT).strategy(1) == MegatronLMPlugin().strategy(1)


def test_advanced_options_of_the_page_are_refused_with_what_to_write() -> None:
    for name, (value, says) in _REFUSED.items():
        with pytest.raises(ConfigurationError, match=rf"{name}.*{says}"):
            MegatronLMPlugin(**{name: value}).strategy(1)  # type: ignore[arg-type]  # one of each
    with pytest.raises(ConfigurationError, match="Use a divisor of 2"):
        MegatronLMPlugin(pp_degree=2, num_layers_per_virtual_pipeline_stage=3).strategy(2, _gpt2())
    for wrong, says in (
        ({"data_path": "a"}, "needs seq_length="),
        ({"data_path": "a", "seq_length": 8, "splits_string": "1;2"}, "write up to three proportions"),
        ({"data_path": "a", "seq_length": 8, "micro_batchsize": 8}, "Did you mean 'micro_batch_size'"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            MegatronLMDummyDataLoader(**wrong)
    with pytest.raises(ConfigurationError, match=r"Use MegatronLMPlugin\(num_micro_batches"):
        Accelerator(megatron_lm_plugin=MegatronLMPlugin(), gradient_accumulation_steps=2, cpu=True)
    with pytest.raises(ConfigurationError, match="both select the engine"):
        Accelerator(megatron_lm_plugin=MegatronLMPlugin(), strategy="ddp", cpu=True)


def _train_on_tokens(path: Path) -> tuple[list[float], list[float]]:
    """Train as on the page on a file of tokens; return the losses of training and evaluation."""
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(pp_degree=2, num_micro_batches=2), cpu=True, seed=0)
    tokens = MegatronLMDummyDataLoader(data_path=str(path), splits_string="80,20,0", seq_length=8, micro_batch_size=2)
    accelerator.state.megatron_lm_plugin.megatron_dataset_flag = True
    model = _gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = MegatronLMDummyScheduler(optimizer=optimizer, total_num_steps=6)
    model, optimizer, lr_scheduler, train_dataloader, eval_dataloader, test = accelerator.prepare(
        model, optimizer, lr_scheduler, tokens, tokens, tokens
    )
    assert test is None
    losses, evaluated = [], []
    for step in range(6):
        model.train()
        batch = next(train_dataloader)
        assert batch["input_ids"].shape == (4, 8)
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                evaluated.append(model(**next(eval_dataloader)).loss.item())
    return losses, evaluated


@pytest.mark.distributed
def test_indexed_data_sets_are_read(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "tokens", vocab_size=32) as writer:
        for _ in range(8):
            writer.add([i % 32 for i in range(25)])
    for losses, evaluated in run_distributed(_train_on_tokens, 2, tmp_path / "tokens", init=False, timeout=60):
        assert losses[0] == pytest.approx(3.5, abs=0.3)
        assert losses[-1] < losses[0]
        assert evaluated[1] < evaluated[0]
    dummy = MegatronLMDummyDataLoader(data_path=f"0.3 {tmp_path}/tokens 0.7 {tmp_path}/tokens", seq_length=8)
    assert isinstance(dummy.files, dict)
    few = MegatronLMDummyDataLoader(data_path=str(tmp_path / "tokens"), seq_length=50, micro_batch_size=9)
    with pytest.raises(ConfigurationError, match="the loader is empty"):
        next(Accelerator(cpu=True).prepare(few))


def test_variables_and_fields_describe_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TP_DEGREE": "2", "PP_DEGREE": "2", "NUM_MICRO_BATCHES": "4", "GRADIENT_CLIPPING": "0.5"}
    values |= {"RECOMPUTE_ACTIVATIONS": "True", "USE_DISTRIBUTED_OPTIMIZER": "True", "SEQUENCE_PARALLELISM": "True"}
    for name, value in values.items():
        monkeypatch.setenv(f"MEGATRON_LM_{name}", value)
    plugin = MegatronLMPlugin()
    assert plugin.gradient_clipping == 0.5
    assert plugin.sequence_parallelism is True
    assert plugin.strategy(4) == MegatronStrategy(
        tp=2, pp=2, num_micro_batches=4, recompute="selective", sequence_parallel="auto"
    )
    monkeypatch.undo()
    plain = MegatronLMPlugin(num_layers_per_virtual_pipeline_stage=1, pp_degree=2, recompute_granularity="full")
    expected = MegatronStrategy(pp=2, schedule="interleaved1f1b", virtual_stages=2, recompute="full")
    assert plain.strategy(2, _gpt2()) == expected.with_options(distributed_optimizer=False)


def test_weight_decay_and_a_cosine_follow_the_plugin() -> None:
    options: dict[str, Any] = {"lr_decay_style": "cosine", "min_lr": 0.1, "lr_warmup_fraction": 0.5}
    options |= {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.4}
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**options), cpu=True)
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer, scheduler = accelerator.prepare(optimizer, MegatronLMDummyScheduler(optimizer, total_num_steps=4))
    found = []
    for _ in range(6):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
        optimizer.step()
        scheduler.step()
    expected = [(0.0, 0.0), (0.5, 0.1), (1.0, 0.2), (0.55, 0.3), (0.1, 0.4), (0.1, 0.4)]
    assert [value for pair in found for value in pair] == pytest.approx([value for pair in expected for value in pair])
    with pytest.raises(ConfigurationError, match=r"Accelerator\(megatron_lm_plugin=…\)"):
        MegatronLMDummyScheduler(optimizer).step()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_steps_compute_the_losses_of_transformers(kind: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    sizes |= {"intermediate_size": 32, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    tokens = torch.randint(2, 32, (4, 8), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    if kind == "bert":
        config = transformers.MegatronBertConfig(**sizes)
        model, step = transformers.MegatronBertForPreTraining(config), BertTrainStep
        batch["next_sentence_label"] = torch.tensor([0, 1, 0, 1])
    else:
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=32, dropout_rate=0, pad_token_id=0,
            decoder_start_token_id=0,
        )  # fmt: skip
        model, step = transformers.T5ForConditionalGeneration(config), T5TrainStep
    expected = model(**batch).loss.item()
    plugin = MegatronLMPlugin(custom_train_step_class=step, gradient_clipping=0)
    model = Accelerator(megatron_lm_plugin=plugin, cpu=True).prepare(model)
    assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-5)
    model.eval()
    assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-5)


def test_positional_arguments_with_custom_functions_are_an_error() -> None:
    plugin = MegatronLMPlugin(custom_loss_function=lambda *_: None, gradient_clipping=0)
    model = Accelerator(megatron_lm_plugin=plugin, cpu=True).prepare(_gpt2())
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ConfigurationError, match=r"received 1 positional argument.*Call model\(\*\*batch\)"):
        model(tokens, labels=tokens)
